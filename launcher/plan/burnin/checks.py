"""All checks, in the order in which they run: first those that decide whether training is correct, then speed. And the
process that carries one out.
"""

from pathlib import Path

from encoder_core.trials.trial_process import Line
from encoder_core.trials.trial_process import Report as Message
from launcher.plan.burnin.check import Bench, Check, Request
from launcher.plan.burnin.report import CannotRun, Report, said

TARGET = "launcher.plan.burnin.checks:serve"

_KERNELS = "launcher.plan.burnin.kernels"
_TOKENWISE = "launcher.plan.burnin.tokenwise"
_TRAINING = "launcher.plan.burnin.training"
_FORMS = (
    "plain",
    "deberta",
    "window",
    "causal",
    "causal-deberta",
    "xlnet-content",
    "xlnet-queries",
    "deberta-few-queries",
    "relative-keys",
    "deberta-positions",
)
_SPEED = "launcher.plan.burnin.speed"
_SPEEDS = (
    ("bert-large", "128"),
    ("roberta-base", "512"),
    ("bert-large", "512"),
    ("deberta-v3-base", "512"),
    ("modernbert-base", "1024"),
    ("own", ""),
)
DEFAULT_RECIPES = ("roberta-base", "bert-large", "deberta-v3-base", "modernbert-base")

CHECKS = (
    Check(
        "environment",
        "What is installed, and that driver, torch and GPU go together.",
        "launcher.plan.burnin.machine:environment",
        gpu=10,
        cpu=8,
    ),
    Check(
        "peaks",
        "Matrix products and bandwidth reach what the vendor says, within reason.",
        "launcher.plan.burnin.machine:peaks",
        gpu=20,
        cpu=10,
    ),
    *(
        Check(
            f"kernel-{form}",
            f"Fused attention, {form.replace('-', ' ')}: compiles, and equals its formula in fp64.",
            f"{_KERNELS}:form",
            gpu=45,
            cpu=30,
            beside=True,
            arguments=(form,),
            needs=("triton",),
        )
        for form in _FORMS
    ),
    Check(
        "widths",
        "Heads of 32, 80, 96 and 128 equal the formula.",
        f"{_KERNELS}:widths",
        beside=True,
        gpu=95,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "windows",
        "Windows and rows that end at the edges of tiles equal the formula.",
        f"{_KERNELS}:windows",
        beside=True,
        gpu=40,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "kernel-norm",
        "Dropout, residual and norm as one kernel equal the formula, five times to the bit.",
        f"{_TOKENWISE}:norm",
        beside=True,
        gpu=40,
        cpu=15,
        needs=("triton",),
    ),
    Check(
        "kernel-loss",
        "Loss, accuracy and gradient of logits equal the formula, five times to the bit.",
        f"{_TOKENWISE}:loss",
        beside=True,
        gpu=40,
        cpu=15,
        needs=("triton",),
    ),
    Check(
        "repeated",
        "Forward and backward five times give equal bits.",
        f"{_KERNELS}:repeated",
        beside=True,
        gpu=40,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "draws",
        "Masks of dropout that the device draws are the CPU's.",
        f"{_KERNELS}:drawn",
        beside=True,
        gpu=15,
        cpu=15,
        needs=("triton",),
    ),
    Check(
        "trial",
        "The trial of kernels that a run makes finds them right.",
        f"{_KERNELS}:trial",
        beside=True,
        gpu=90,
        cpu=30,
    ),
    *(
        Check(
            f"zero-{stage}",
            f"20 steps at ZeRO {stage}: the CPU's losses, in fp32 to 1e-4 and in bf16 to 1e-2.",
            f"{_TRAINING}:zero",
            beside=True,
            gpu=45,
            cpu=60,
            arguments=(str(stage),),
            needs=("deepspeed",),
        )
        for stage in range(4)
    ),
    Check(
        "waits",
        "Nothing inside a microbatch waits for the device.",
        f"{_TRAINING}:waits",
        beside=True,
        gpu=60,
        cpu=40,
        needs=("deepspeed",),
    ),
    Check(
        "deterministic",
        "Two processes train alike with `deterministic: true`, bit for bit.",
        f"{_TRAINING}:deterministic",
        beside=True,
        gpu=50,
        cpu=60,
        needs=("deepspeed",),
    ),
    Check(
        "offsets",
        "Rows beyond element 2^31 of every tensor give the same bits.",
        f"{_KERNELS}:offsets",
        gpu=30,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "checkpoint",
        "State survives the way from device to CPU and back, bit for bit; and how long training stalls.",
        f"{_TRAINING}:checkpoint",
        gpu=60,
        cpu=40,
        needs=("deepspeed",),
    ),
    Check(
        "sums",
        "Ranks add up known numbers exactly and alike, over NCCL on every GPU; and how fast.",
        "launcher.plan.burnin.sums:collectives",
        gpu=30,
        cpu=20,
    ),
    Check(
        "deaths",
        "A rank leaves NCCL's sums with a rank that was killed, and sums with a new one.",
        "launcher.plan.burnin.deaths:outlived",
        gpu=60,
        cpu=40,
        needs=("deepspeed",),
    ),
    Check(
        "shortage",
        "Where memory gives out, it is noticed before a step, and training goes on with less.",
        "launcher.plan.burnin.memory:shortage",
        gpu=40,
        cpu=30,
        needs=("deepspeed",),
    ),
    Check(
        "memory",
        "The peak of memory is what was estimated.",
        "launcher.plan.burnin.memory:estimated",
        gpu=60,
        cpu=30,
        needs=("deepspeed",),
    ),
    *(
        Check(
            f"compiled-{turn}",
            f"Compiled layers have Python's gradients; and how long compiling takes, {turn}.",
            f"{_SPEED}:compiled",
            gpu=120 if turn == "cold" else 40,
            cpu=180 if turn == "cold" else 60,
            arguments=(turn,),
        )
        for turn in ("cold", "cached")
    ),
    Check(
        "train",
        "A real run is killed in the middle and resumes to the bits of an undisturbed one.",
        "launcher.plan.burnin.whole_run:killed_and_resumed",
        gpu=180,
        cpu=150,
        needs=("ray", "deepspeed"),
    ),
    Check(
        "kernel-times",
        "How long every form of fused attention takes, and the kernels of norms and of the loss beside torch.",
        f"{_KERNELS}:timed",
        gpu=60,
        cpu=15,
        figures=True,
        needs=("triton",),
    ),
    *(
        Check(
            f"speed-{name}{f'-{length}' if length else ''}",
            "Tokens a second and MFU, compiled or not, with dropout or not.",
            f"{_SPEED}:trained",
            gpu=80,
            cpu=120,
            arguments=(name, length),
            figures=True,
            needs=("deepspeed",),
        )
        for name, length in _SPEEDS
    ),
)


def checks_for(recipe: str | None) -> list[Check]:
    """Return all checks. If a recipe is given, its speed is measured in place of the default recipes' speeds."""
    left_out = "speed-own" if recipe is None else "speed-"
    return [
        check
        for check in CHECKS
        if not (check.figures and check.name.startswith(left_out)) or (recipe and check.name == "speed-own")
    ]


def serve(request: Message, line: Line) -> None:
    """Carry out one check. The last mark tells how the check ended."""
    check = next(one for one in CHECKS if one.name == request["check"])
    report = Report(lambda what: line.report(**what))
    try:
        check.carry_out(Bench(Request.model_validate(request["request"]), report, Path(request["folder"])))
    except CannotRun as lacking:
        report.mark("skipped", str(lacking))
    except Exception as error:  # of any kind: the check has failed, and the others go on
        report.mark("failed", said(error))
    else:
        report.mark("ended")
