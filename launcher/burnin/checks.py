"""All checks, in the order in which they are done: first what decides whether training is right, then figures."""

from launcher.burnin.check import Check

_KERNELS = "launcher.burnin.kernels"
_TRAINING = "launcher.burnin.training"
_FORMS = (
    "plain",
    "deberta",
    "window",
    "xlnet-content",
    "xlnet-queries",
    "deberta-few-queries",
    "relative-keys",
    "deberta-positions",
)
DEFAULT_RECIPES = ("roberta-base", "bert-large", "deberta-v3-base", "modernbert-base")

CHECKS = (
    Check(
        "environment",
        "What is installed, and that driver, torch and GPU go together.",
        "launcher.burnin.machine:environment",
        gpu=10,
        cpu=8,
    ),
    Check(
        "peaks",
        "Matrix products and bandwidth reach what the vendor says, within reason.",
        "launcher.burnin.machine:peaks",
        gpu=20,
        cpu=10,
    ),
    *(
        Check(
            f"kernel-{form}",
            f"Fused attention, {form.replace('-', ' ')}: compiles, equals its formula in fp64; and its speed.",
            f"{_KERNELS}:form",
            gpu=60,
            cpu=30,
            arguments=(form,),
            needs=("triton",),
        )
        for form in _FORMS
    ),
    Check(
        "widths",
        "Heads of 32, 80, 96 and 128 equal the formula.",
        f"{_KERNELS}:widths",
        gpu=90,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "windows",
        "Windows and rows that end at the edges of tiles equal the formula.",
        f"{_KERNELS}:windows",
        gpu=40,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "repeated",
        "Forward and backward five times give equal bits.",
        f"{_KERNELS}:repeated",
        gpu=40,
        cpu=20,
        needs=("triton",),
    ),
    Check(
        "draws",
        "Masks of dropout that the device draws are the CPU's.",
        f"{_KERNELS}:drawn",
        gpu=15,
        cpu=15,
        needs=("triton",),
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
        "trial",
        "The trial of kernels that a run makes finds them right.",
        f"{_KERNELS}:trial",
        gpu=60,
        cpu=30,
    ),
    *(
        Check(
            f"zero-{stage}",
            f"20 steps at ZeRO {stage}: the CPU's losses, in fp32 to 1e-4 and in bf16 to 1e-2.",
            f"{_TRAINING}:zero",
            gpu=60,
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
        gpu=60,
        cpu=40,
        needs=("deepspeed",),
    ),
    Check(
        "deterministic",
        "Two processes train alike with `deterministic: true`, bit for bit.",
        f"{_TRAINING}:deterministic",
        gpu=50,
        cpu=60,
        needs=("deepspeed",),
    ),
    Check(
        "checkpoint",
        "State survives the way from device to CPU and back, bit for bit; and how long training stalls.",
        f"{_TRAINING}:checkpoint",
        gpu=60,
        cpu=40,
        needs=("deepspeed",),
    ),
)
