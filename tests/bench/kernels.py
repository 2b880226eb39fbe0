"""Our kernels compiled for GPUs that need not be here: python tests/bench/kernels.py.

The launches of `encoder_core/kernels` themselves, forward and backward, go Triton's just-in-time path, with a driver
that names the GPU and launches nothing: so what compiles here compiles there, with this Triton. Its
wheel brings NVIDIA's assembler and disassembler. For each launch: registers of a thread, shared memory of a program,
instructions that spill registers, and those that multiply matrices. Nothing runs, so nothing here says how fast a
kernel is.

    python tests/bench/kernels.py --sm 90 --width 64 --dtype bf16 --form plain      # a table to read
    python tests/bench/kernels.py --write tests/encoder_core/kernels/compiled.csv   # all: an hour a Triton

Another Triton: `pip install --target DIR --no-deps triton==3.6.0`, and DIR first on PYTHONPATH.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from program import BenchError, note, run
from warp_group_operands import overwritten_operands

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 64},
    "causal": {"causal": True},
    "relative keys": {"table_a": True},
    "DeBERTa": {"table_a": True, "table_b": True},
    "DeBERTa, causal": {"table_a": True, "table_b": True, "causal": True},
    "DeBERTa, position to position": {"table_a": True, "table_b": True, "table_c": True},
    "DeBERTa, few queries": {"table_a": True, "table_b": True, "few": True},
    "XLNet, content": {
        "table_a": True, "own_r": True, "segments": True, "order": True, "signs": True, "carried": 64,
    },
    "XLNet, queries": {
        "table_a": True, "own_r": True, "segments": True, "order": True, "signs": True, "carried": 64, "few": True,
    },
}  # fmt: skip
"""Of scores, as `tests/support/models/relative_attention.py` takes them, with dropout, which costs registers."""
NORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "LayerNorm, no dropout": {"dropout": 0.0},
    "LayerNorm without bias": {"biased": False, "sum_used": True},
    "RMSNorm": {"centered": False, "biased": False, "sum_used": True},
    "RMSNorm, no dropout": {"centered": False, "biased": False, "sum_used": True, "dropout": 0.0},
}
"""Of a residual sum: as in post-norm encoders, ModernBERT and EuroBERT."""
LOSSES = {"loss": True, "loss without bias": False}
UPDATE = "StableAdamW"
"""Of flat tensors in fp32. It is on no record: nothing of a recipe is compiled in."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = (32, 64, 80, 96, 128)
STATES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
NORM_WIDTHS = {
    "LayerNorm": STATES,
    "LayerNorm, no dropout": STATES,
    "LayerNorm without bias": (768, 1024, 1792),
}
"""Of the states of recipes; elsewhere EuroBERT's."""
VOCABULARIES = (21_184, 29_056, 30_016, 30_528, 32_000, 50_304, 50_368, 95_040, 128_128, 128_256, 256_000)
"""Of recipes, rounded up as on a GPU (`encoder_core/heads/cross_entropy.py`)."""
EVERY_FORM = (*FORMS, *NORMS, *LOSSES)
ARCHITECTURES = (80, 90, 100)
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that one program may have (CUDA programming guide, compute capabilities)."""
REGISTERS, WARPS = 64 << 10, 64  # of a multiprocessor
_RESERVED = 1 << 10  # bytes of shared memory, by each program
LENGTHS = [200, 90]  # of rows: longer than any tile


@dataclass(frozen=True, order=True)
class Compiled:
    """What one launch became.

    Attributes:
        width: of a head, of states, or the vocabulary.
        registers: of a thread. shared: bytes of a program. spills: instructions that spill registers.
        wgmma, mma: instructions that multiply matrices: of whole warp groups (sm_90) or by the tensor memory (sm_100),
            and of single warps.
        instructions: all.
    """

    sm: int
    dtype: str
    width: int
    form: str
    kernel: str
    triton: str
    tile: str
    warps: int
    stages: int
    registers: int
    shared: int
    spills: int
    wgmma: int
    mma: int
    instructions: int

    @property
    def programs(self) -> int:
        """That a multiprocessor has room for, by registers and shared memory."""
        registers = -(-self.registers // 8) * 8  # a thread's come in eights
        by_registers = REGISTERS // (max(registers, 24) * 32 * self.warps)
        by_shared = (SHARED[self.sm] + _RESERVED) // (self.shared + _RESERVED)
        return min(by_registers, by_shared, WARPS // self.warps)

    @property
    def faults(self) -> list[str]:
        """Why it would not run, or not well."""
        found = []
        if self.shared > SHARED[self.sm]:
            found.append(f"{self.shared:,} bytes of shared memory, there are {SHARED[self.sm]:,}")
        if self.spills:
            found.append(f"{self.spills} instructions spill registers")
        return found


class GpuDriver:
    """What Triton asks of a driver, for a GPU that is not there. Its number is its architecture: one cache each."""

    def __init__(self) -> None:
        self.architecture = ARCHITECTURES[0]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def compiling(device: GpuDriver) -> Iterator[list[tuple[str, str, Any]]]:
    """While this lasts, a launch only compiles: its kernel's name, its tile, and Triton's kernel are in the list."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, KernelInterface

    from encoder_core.kernels import fused_attention

    found: list[tuple[str, str, Any]] = []

    def launch(function: Any, grid: Any) -> Callable[..., Any]:
        def compiled(*arguments: Any, **options: Any) -> None:
            made = JITFunction.run(function, *arguments, grid=grid, warmup=True, **options)
            size = options.get("padded") or options.get("columns") or arguments[-1].size
            found.append((function.fn.__name__, str(size), made))

        return compiled

    before, driver_before = KernelInterface.__getitem__, driver._active
    KernelInterface.__getitem__ = launch
    driver.set_active(device)
    try:
        with patch.object(fused_attention, "compute_generation", lambda of: device.architecture // 10):
            yield found
    finally:
        KernelInterface.__getitem__ = before
        driver._active = driver_before


def compile_all(
    architectures: list[int],
    *,
    forms: list[str],
    dtypes: list[str],
    widths: list[int] | None,
    progress: Callable[[str], None],
) -> Iterator[Compiled]:
    """Every launch of a forward and a backward pass, in the tiles that are used.

    Raises BenchError without Triton, or under its interpreter.
    """
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise BenchError("TRITON_INTERPRET is set: nothing is compiled", remedy="unset it")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise BenchError("Triton is not installed", remedy="install the dev extra") from error
    for architecture in architectures:
        for dtype in dtypes:
            for form in forms:
                progress(f"sm_{architecture} {dtype} {form}")
                for width in widths or widths_of(form):
                    yield from launches(architecture, dtype, width, form)


def widths_of(form: str) -> tuple[int, ...]:
    """Those of heads, of recipes' states, or recipes' vocabularies."""
    if form in FORMS:
        return WIDTHS
    if form == UPDATE:
        return (2048,)
    return VOCABULARIES if form in LOSSES else NORM_WIDTHS.get(form, (768, 1152, 2304))


def launches(architecture: int, dtype: str, width: int, form: str, cuts: Any = None) -> Iterator[Compiled]:
    """Of one form; `cuts`: other than those that are used."""
    import triton

    device = GpuDriver()
    device.architecture = architecture
    with compiling(device) as found:
        if form in FORMS:
            _attention(form, width, DTYPES[dtype], cuts)
        elif form in NORMS:
            _norm(width, DTYPES[dtype], **NORMS[form])
        elif form == UPDATE:
            _update()
        else:
            _loss(width, DTYPES[dtype], biased=LOSSES[form])
    for kernel, tile, made in found:
        registers, spills, whole, single, instructions = _inspect(made.asm["cubin"])
        yield Compiled(
            sm=architecture,
            dtype=dtype,
            width=width,
            form=form,
            kernel=kernel.removesuffix("_kernel"),
            triton=triton.__version__,
            tile=tile,
            warps=made.metadata.num_warps,
            stages=made.metadata.num_stages,
            registers=registers,
            shared=made.metadata.shared,
            spills=spills,
            wgmma=whole,
            mma=single,
            instructions=instructions,
        )


def _attention(form: str, width: int, dtype: torch.dtype, cuts: Any) -> None:
    from tests.support.models.relative_attention import CPU, DROPOUT, Form, fused, problem

    given: dict[str, Any] = {"dropout": DROPOUT, "width": width, "dtype": dtype} | FORMS[form]
    fused(problem(LENGTHS, Form(**given), device=CPU), cuts)  # nothing is launched


def _norm(
    width: int,
    dtype: torch.dtype,
    *,
    dropout: float = 0.1,
    centered: bool = True,
    biased: bool = True,
    sum_used: bool = False,
) -> None:
    from encoder_core.kernels.residual_norm import NormParameters, residual_norm
    from encoder_core.layers.dropout import drop_threshold

    x, residual = (torch.zeros(3, width, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias = (torch.zeros(width, dtype=dtype, requires_grad=True) for _ in range(2))
    norm = NormParameters(weight, bias if biased else None, 1e-6, centered)
    threshold = drop_threshold(dropout)
    draws = torch.zeros(3, dtype=torch.int64) if threshold else None
    total, normed = residual_norm(x, residual, norm, draws, threshold)
    torch.autograd.backward([normed, total] if sum_used else [normed], [x.detach()] * (1 + sum_used))


def _loss(vocab: int, dtype: torch.dtype, *, biased: bool) -> None:
    from encoder_core.kernels.softmax_loss import overwrite_with_gradient, softmax_sums

    logits, ids = torch.zeros(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    overwrite_with_gradient(logits, ids, softmax_sums(logits, ids), biased=biased)


def _update() -> None:
    from encoder_core.kernels.stable_adamw import split_into_blocks, update_moments, update_weights

    flat, squares = torch.zeros(9), torch.zeros(1, dtype=torch.float64)
    state = {"exp_avg": torch.zeros(9), "exp_avg_sq": torch.zeros(9)}
    group = {"betas": (0.9, 0.98), "eps": 1e-6, "step": 3, "lr": 1e-3, "weight_decay": 0.1}
    blocks = split_into_blocks([(0, 9, 0, 9)], flat.device)
    update_moments(flat, state, blocks, squares, group)
    update_weights(flat, state, blocks, squares, group)


@cache
def _inspect(cubin: bytes) -> tuple[int, int, int, int, int]:
    """Registers; loads and stores of spilled ones; products of matrices, by many warps and by one; all instructions.

    Raises BenchError if registers are written before a product has read them.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for product, early in overwritten_operands(code):
        raise BenchError(
            f"{early.name} {early.operands} writes registers that {product.name} {product.operands} still reads",
            remedy="choose other tiles, or a Triton whose ptxas is of CUDA 13.3 or later",
        )
    registers = max(map(int, re.findall(r"REG:(\d+)", code)))

    def count(names: str) -> int:
        return len(re.findall(rf"\b(?:{names})\b", code))

    instructions = len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s", code, re.MULTILINE))
    return registers, count("STL|LDL"), count(r"HGMMA|UTC\w*MMA"), count("HMMA|DMMA"), instructions


def render(table: list[Compiled]) -> str:
    """As a table in markdown."""
    names = [field.name for field in fields(Compiled)]
    lines = ["| " + " | ".join([*names, "programs"]) + " |", "|---" * (len(names) + 1) + "|"]
    lines += ["| " + " | ".join(map(str, (*astuple(one), one.programs))) + " |" for one in table]
    return "\n".join(lines)


def read(path: Path) -> list[Compiled]:
    """A table that `write` made."""
    kinds = {field.name: field.type for field in fields(Compiled)}
    with path.open(newline="") as file:
        return [
            Compiled(**dict[str, Any]({n: v if kinds[n] is str else int(v) for n, v in row.items()}))
            for row in csv.DictReader(file)
        ]


def write(path: Path, table: list[Compiled]) -> None:
    """Sorted; rows that are there of what was not compiled now stay."""

    def launched(one: Compiled) -> tuple[object, ...]:
        return one.triton, one.sm, one.dtype, one.width, one.form

    mine = set(map(launched, table))
    others = [one for one in (read(path) if path.is_file() else []) if launched(one) not in mine]
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Compiled)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(one) for one in sorted([*others, *table]))


def main(
    sm: Annotated[list[int], typer.Option(help="compute capabilities")] = list(ARCHITECTURES),  # noqa: B006
    form: Annotated[list[str], typer.Option(help="of scores, norms or losses")] = list(EVERY_FORM),  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="of what is computed")] = list(DTYPES),  # noqa: B006
    width: Annotated[list[int] | None, typer.Option(help="of heads or states, or a vocabulary")] = None,
    to: Annotated[Path | None, typer.Option("--write", help="a CSV file; other rows in it stay")] = None,
) -> None:
    """Print the table, or write it."""
    table = list(compile_all(sm, forms=form, dtypes=dtype, widths=width, progress=note))
    if to is None:
        typer.echo(render(table))
    else:
        write(to, table)
    for one in table:
        for fault in one.faults:
            note(f"sm_{one.sm} {one.dtype} {one.width} {one.form}, {one.kernel}: {fault}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # tests.support
    run(main)
