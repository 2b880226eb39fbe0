"""What a recipe's step takes on this GPU, kernel by kernel: python tests/bench/gpu_step.py RECIPE.

A step of two microbatches of 32,768 random tokens in full rows, as `tests/gpu/test_speed.py` times it, and then one
step under torch's profiler: milliseconds and launches of each kernel. Without a GPU the recipe's small form runs on the
CPU, and operations are listed in place of kernels.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from program import note, run
from torch.profiler import ProfilerActivity, profile

from encoder_core.train.engine import Engine
from launcher.runtime.preflight.kernels import is_triton_installed
from tests.gpu.machine import DEVICE, GPU
from tests.gpu.networks import Steps, engine_of, joined, recipe_of
from tests.gpu.timing import MICROBATCH_TOKENS, choose_kernels, compiled_pieces, step_seconds, take_step

_LISTED = 40


def kernels_of(engine: Engine, steps: Steps) -> list[tuple[str, int, float]]:
    """Return (kernel, launches, milliseconds) of one step, the longest first."""
    work = steps.work(engine, 0)
    counts = steps.counts(engine, work)
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * GPU) as seen:
        take_step(engine, work, counts, 0)
        if GPU:
            torch.cuda.synchronize()
    kernels = [
        (event.key, event.count, (event.self_device_time_total if GPU else event.self_cpu_time_total) / 1e3)
        for event in seen.key_averages()
        if not GPU or "CUDA" in str(event.device_type)
    ]
    return sorted((one for one in kernels if one[2]), key=lambda one: -one[2])


def main(
    recipe: Annotated[str, typer.Argument(help="a bundled recipe or a file")],
    length: Annotated[int | None, typer.Option(help="tokens of a row; default: the first phase's")] = None,
    dropout: Annotated[float | None, typer.Option(help="in place of the recipe's rates")] = None,
    python: Annotated[bool, typer.Option("--python", help="do not compile layers")] = False,
) -> None:
    """Print tokens a second and the kernels of a step."""
    chosen = recipe_of(recipe, dropout=dropout)
    tokens = (length if GPU else None) or chosen.phases[0].length
    rows = max(1, MICROBATCH_TOKENS // tokens)
    with tempfile.TemporaryDirectory() as folder, joined(DEVICE, Path(folder)):
        note("trying kernels")
        choose_kernels(chosen)
        plain = python or (GPU and not is_triton_installed())
        note("building" if plain else "compiling")
        pieces = None if plain else compiled_pieces(chosen, rows, tokens)
        steps = Steps(chosen, 2, rows, tokens, even=True)
        engine = engine_of(chosen, 1, "bf16", pieces)
        median = step_seconds(engine, steps)
        kernels = kernels_of(engine, steps)
    typer.echo(
        f"{chosen.name}, 2 x {rows} rows of {tokens}: {1e3 * median:.1f} ms a step, {2 * rows * tokens / median:,.0f} "
        f"tokens/s; {sum(one[2] for one in kernels):.1f} ms in {sum(one[1] for one in kernels):,} launches"
    )
    for name, count, milliseconds in kernels[:_LISTED]:
        typer.echo(f"{milliseconds:10.3f} ms {count:6,} x {name[:90]}")


if __name__ == "__main__":
    run(main)
