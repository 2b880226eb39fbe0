"""The fused attention's kernels in turn with those of an earlier commit: python tests/bench/gpu_pairs.py BEFORE.

    git worktree add --detach /tmp/before COMMIT
    python tests/bench/gpu_pairs.py /tmp/before --form deberta --form deberta-few-queries

New, earlier, new, earlier: each turn is a process of its own, which computes passes forward and backward and takes
milliseconds of every kernel from torch's profiler. 16,384 tokens, 12 heads of 64, bf16, dropout 0.1. Whatever is no
kernel of attention (sums, zeros) counts as "others". Without a GPU a small problem is interpreted, and milliseconds are
those of whole passes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from program import BenchError, note, run

ROOT = Path(__file__).parents[2]
_PASSES, _WARM = 30, 3
_TOKENS = 16_384


def alone(form: str, length: int) -> dict[str, float]:
    """Return milliseconds a pass by kernel, with the kernels of the tree that comes first on the path."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tests.gpu.problems import FORMS, Size, problem
    from tests.support.models.relative_attention import kernels, outcome

    gpu = torch.cuda.is_available()
    size = Size((length,) * max(1, _TOKENS // length), 12, 64, torch.bfloat16, 0.1)
    small = Size((5, 20), 1, 16, torch.float32, 0.1)
    given = problem(FORMS[form], size if gpu else small, torch.device("cuda" if gpu else "cpu"))
    if not gpu:
        began = time.perf_counter()
        outcome(kernels(given), given)
        return {"pass": 1e3 * (time.perf_counter() - began)}
    for _ in range(_WARM):
        outcome(kernels(given), given)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_PASSES):
            context = kernels(given)
            torch.autograd.grad(context, list(given.inputs.values()), context.detach())
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in seen.key_averages():
        name = event.key.removesuffix("_kernel") if event.key.endswith("_kernel") else "others"
        spent[name] = spent.get(name, 0.0) + event.self_device_time_total / _PASSES / 1e3
    return spent


def turn(tree: Path, form: str, length: int) -> dict[str, float]:
    """Return the same, found by a process whose kernels are those of `tree`."""
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--form", form, f"--length={length}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    answer = subprocess.run([*command, "--alone"], env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise BenchError(f"{tree}: {answer.stderr[-1000:]}", remedy="a tree that has tests/gpu/problems.py")
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def render(form: str, turns: list[tuple[str, dict[str, float]]]) -> str:
    """Return a line for each turn."""
    lines = []
    for name, spent in turns:
        told = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in sorted(spent.items()))
        lines.append(f"{form}, {name}: {sum(spent.values()):.3f} ms; {told}")
    return "\n".join(lines)


def main(
    before: Annotated[Path, typer.Argument(help="a work tree of an earlier commit")],
    form: Annotated[list[str], typer.Option(help="of scores, as in tests/gpu/problems.py")] = ["deberta"],  # noqa: B006
    length: Annotated[int, typer.Option(help="tokens of a row")] = 512,
    pairs: Annotated[int, typer.Option(help="turns of each")] = 2,
    measured: Annotated[bool, typer.Option("--alone", hidden=True)] = False,
) -> None:
    """Print milliseconds a pass by kernel, of each turn."""
    if not (before / "tests/gpu/problems.py").is_file():
        raise BenchError(f"{before}: no work tree with tests/gpu/problems.py", remedy="git worktree add")
    if measured:
        typer.echo(json.dumps(alone(form[0], length)))
        return
    for name in form:
        turns = []
        for number in range(2 * pairs):
            tree = before if number % 2 else ROOT
            turns.append(("earlier" if number % 2 else "new", turn(tree, name, length)))
            note(f"{name}: {number + 1} of {2 * pairs} turns")
        typer.echo(render(name, turns))


if __name__ == "__main__":
    run(main)
