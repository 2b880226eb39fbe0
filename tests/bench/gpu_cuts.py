"""Which tiles, warps and stages are fastest for the fused attention on this GPU: python tests/bench/gpu_cuts.py.

For each form of scores and each kernel: the milliseconds of every cut (`encoder_core/kernels/tiling.py`), the fastest
first, and how far its outcome is off that of the cut in use. 32 rows of 512 tokens, 12 heads. Processes compile all
cuts beforehand, beside each other; then one process times them, alone. Without a GPU the interpreter runs a small
problem and nothing is timed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from program import BenchError, note, run
from torch.profiler import ProfilerActivity, profile

from encoder_core.kernels.fused_attention import fused_attention
from encoder_core.kernels.tiling import Tiling, Tilings, choose_tilings, compute_generation
from tests.gpu.problems import FORMS, Size, problem
from tests.support.models.relative_attention import Problem, outcome

ROOT = Path(__file__).parents[2]
SIZES = {
    "gpu": Size((512,) * 32, 12, 64, torch.bfloat16, 0.1),
    "cpu": Size((5, 20), 1, 16, torch.float32, 0.1),
}
CANDIDATES = {
    "gpu": [
        *(Tiling(64, warps, stages) for warps in (4, 8) for stages in (1, 2, 3)),
        *(Tiling(32, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3)),
        *(Tiling(128, warps, stages) for warps, stages in ((4, 2), (8, 1), (8, 2), (8, 3))),
        *(Tiling(16, warps, stages) for warps, stages in ((2, 2), (4, 1))),
    ],
    "cpu": [Tiling(16, 4, 1), Tiling(32, 4, 1)],
}
_REPEATS, _WARM = 8, 2


@dataclass(frozen=True)
class Timed:
    """One kernel with one cut. `off`: how far the outcome is off, relative; `failure`: why there is none."""

    form: str
    kernel: str
    cut: Tiling
    milliseconds: float = float("inf")
    off: float = 0.0
    failure: str = ""


def used(form: str, size: Size) -> Tilings:
    """Return the cuts in use."""
    shape, kind = FORMS[form], compute_generation(device())
    relative = shape.table_a or shape.table_b or shape.segments
    return choose_tilings(
        size.dtype,
        size.width,
        kind or 9,
        has_relative_terms=relative,
        has_table_b=shape.table_b,
        has_table_c=shape.table_c,
    )


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def every(form: str, kind: str) -> Iterator[tuple[str, Tiling]]:
    """Yield kernels and cuts, those in use first."""
    first = used(form, SIZES[kind])
    for kernel in Tilings._fields:
        for cut in dict.fromkeys([getattr(first, kernel), *CANDIDATES[kind]]):
            yield kernel, cut


def passed(given: Problem, cuts: Tilings) -> dict[str, torch.Tensor]:
    inputs = given.inputs
    context = fused_attention(inputs["q"], inputs["k"], inputs["v"], given.terms, given.layout, cuts)
    return outcome(context, given)


def measured(form: str, kind: str, wanted: Callable[[int], bool]) -> Iterator[Timed]:
    """Time the cuts whose number is `wanted`."""
    size = SIZES[kind]
    given, cuts = problem(FORMS[form], size, device()), used(form, size)
    expected = passed(given, cuts)
    for number, (kernel, cut) in enumerate(every(form, kind)):
        if not wanted(number):
            continue
        try:
            yield _timed(Timed(form, kernel, cut), given, cuts._replace(**{kernel: cut}), expected)
        except Exception as failed:  # a cut that does not compile, or has no room, is a result
            yield Timed(form, kernel, cut, failure=f"{type(failed).__name__}: {failed}"[:100])


def _timed(one: Timed, given: Problem, cuts: Tilings, expected: dict[str, torch.Tensor]) -> Timed:
    found = passed(given, cuts)
    off = max(
        float((found[name] - x).double().norm() / x.double().norm().clamp_min(1e-20)) for name, x in expected.items()
    )
    for _ in range(_WARM):
        passed(given, cuts)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(_REPEATS):
            passed(given, cuts)
        if device().type == "cuda":
            torch.cuda.synchronize()
    mine = [event for event in seen.key_averages() if event.key == f"{one.kernel}_kernel"]
    spent = sum(event.self_device_time_total for event in mine) / _REPEATS / 1e3
    return Timed(one.form, one.kernel, one.cut, spent, off)


def compile_beside(forms: list[str], jobs: int) -> None:
    """Let `jobs` processes run every cut once, so that Triton's cache has them."""
    command = [sys.executable, str(Path(__file__).resolve()), *(f"--form={form}" for form in forms)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    workers = [
        subprocess.Popen([*command, f"--part={part}/{jobs}"], stdout=subprocess.DEVNULL, env=environment)
        for part in range(jobs)
    ]
    for worker in workers:
        worker.wait()


def render(found: list[Timed]) -> str:
    """Return a line for each kernel of each form."""
    lines = []
    for form, kernel in dict.fromkeys((one.form, one.kernel) for one in found):
        mine = [one for one in found if (one.form, one.kernel) == (form, kernel)]
        first = mine[0]
        ranks = sorted(mine, key=lambda one: one.milliseconds)
        told = ", ".join(
            f"{tuple(one.cut)} {one.failure or f'{one.milliseconds:.3f} ({one.off:.0e})'}" for one in ranks
        )
        lines.append(f"{form}, {kernel}: in use {tuple(first.cut)} {first.milliseconds:.3f} ms; {told}")
    return "\n".join(lines)


def main(
    form: Annotated[list[str], typer.Option(help="forms of scores")] = list(FORMS),  # noqa: B006
    jobs: Annotated[int, typer.Option(help="processes that compile; 0: none")] = 8,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print each kernel's milliseconds by cut."""
    if unknown := sorted(set(form) - set(FORMS)):
        raise BenchError(f"no form is called {unknown[0]!r}", remedy=f"one of {', '.join(FORMS)}")
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    index, _, count = part.partition("/")
    if jobs and kind == "gpu" and not part:
        note(f"{jobs} processes compile")
        compile_beside(form, jobs)
    found: list[Timed] = []
    for name in form:
        found += measured(name, kind, lambda number: not part or number % int(count) == int(index))
        note(f"{name} is done")
    typer.echo(render(found))


if __name__ == "__main__":
    run(main)
