"""The fused attention's kernels compiled for GPUs that need not be here: python tests/bench/kernels.py.

Triton's wheel brings NVIDIA's assembler. For each architecture, kernel and form of scores: registers of a thread,
shared memory of a program, instructions that spill registers, and those that use tensor cores. Nothing runs, so
nothing here says how fast a kernel is.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from program import BenchError, note, run

TENSORS = ["q", "k", "v", "table_a", "table_b", "table_c", "r", "segment_scores"]
WHOLE = {
    "segments_q": 64,
    "segments_k": 64,
    "ranks_q": 64,
    "ranks_k": 64,
    "draws": 64,
    "signs": 32,
    "slots": 32,
}
ALWAYS = {
    "cu_seqlens": "*i32",
    "scale": "fp32",
    "threshold": "i32",
    "inverse": "fp32",
    **dict.fromkeys(("heads", "rows", "carried", "center", "distances"), "i32"),
}
FORMS = {
    "plain": "draws",
    "window": "draws window",
    "relative keys": "draws table_a table_b",
    "DeBERTa": "draws table_a table_b",
    "DeBERTa, position to position": "draws table_a table_b table_c",
    "DeBERTa, few queries": "draws table_a table_b slots",
    "XLNet, content": "draws r table_a segment_scores segments_q segments_k ranks_q ranks_k signs",
    "XLNet, queries": "draws r table_a segment_scores segments_q segments_k ranks_q ranks_k signs slots",
}
KERNELS = ("forward", "queries", "keys", "tables")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Compiled:
    """What one kernel became."""

    form: str
    kernel: str
    dtype: str
    architecture: int
    tile: int
    warps: int
    registers: int
    shared: int
    spills: int
    tensor_cores: int


def compile_all(
    architectures: list[int],
    *,
    forms: list[str],
    dtypes: list[str],
    width: int,
    progress: Callable[[str], None],
) -> Iterator[Compiled]:
    """Every kernel that a form has, in the tiles that are used.

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
                for kernel in KERNELS:
                    if kernel != "tables" or "table_a" in FORMS[form]:
                        progress(f"sm_{architecture} {dtype} {form}: {kernel}")
                        yield compile_one(architecture, dtype, form, kernel, width)


def compile_one(architecture: int, dtype: str, form: str, kernel: str, width: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from encoder_core.kernels.operands import Tile
    from encoder_core.kernels.tiling import cuts_of

    cut = getattr(cuts_of(DTYPES[dtype], width, architecture // 10), kernel)
    tile = Tile(cut.size, width, max(16, 1 << (width - 1).bit_length()), triton.language.float32, True)
    function, signature = _signature(kernel, form, dtype)
    constants: dict[tuple[int, ...], Any] = {}
    attributes = {}
    for at, (name, kind) in enumerate(signature.items()):
        for path, one in (
            [((at,), kind)] if isinstance(kind, str) else [((at, i), k) for i, k in enumerate(kind)]
        ):
            if one == "constexpr":
                constants[path] = tile if name == "tile" else None
            elif one.startswith("*"):
                attributes[path] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=cut.options,
    )
    registers, spills, tensor_cores = _inspect(made.asm["cubin"])
    return Compiled(
        form=form,
        kernel=kernel,
        dtype=dtype,
        architecture=architecture,
        tile=cut.size,
        warps=cut.warps,
        registers=registers,
        shared=made.metadata.shared,
        spills=spills,
        tensor_cores=tensor_cores,
    )


def _signature(kernel: str, form: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The function, and Triton's types of its arguments; what a form leaves out is a constant, None."""
    from encoder_core.kernels.backward import keys_kernel, queries_kernel
    from encoder_core.kernels.forward import forward_kernel
    from encoder_core.kernels.operands import Inputs
    from encoder_core.kernels.table_gradients import tables_kernel

    has = {"q", "k", "v", *FORMS[form].split()}
    pointer, sums = f"*{dtype}", "*fp32"
    types = dict(ALWAYS) | dict.fromkeys(TENSORS, pointer) | {n: f"*i{bits}" for n, bits in WHOLE.items()}
    types["window"] = "i32"
    inputs = Inputs(
        **{name: types[name] if name in has or name in ALWAYS else "constexpr" for name in Inputs._fields}
    )

    def only(name: str, kind: str) -> str:
        return kind if name in has else "constexpr"

    given = {"grad": pointer, "log_sums": sums, "deltas": sums}
    function, arguments = {
        "forward": (forward_kernel, {"context": pointer, "log_sums": sums, "tiles": "i32"}),
        "queries": (
            queries_kernel,
            given
            | {"d_q": pointer, "d_r": only("r", pointer), "d_segments": only("segment_scores", pointer)}
            | {"tiles": "i32"},
        ),
        "keys": (keys_kernel, given | {"d_k": pointer, "d_v": pointer, "tiles": "i32"}),
        "tables": (
            tables_kernel,
            given
            | {f"d_{x}": only(f"table_{x}", sums) for x in "abc"}
            | {"lowest": "i32", "differences": "i32", "splits": "i32"},
        ),
    }[kernel]
    return function, {"x": inputs, **arguments, "tile": "constexpr"}


def _inspect(cubin: bytes) -> tuple[int, int, int]:
    """Registers; loads and stores of spilled ones; tensor-core instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return int(found[1]), spills, len(re.findall(r"\b(?:HMMA|HGMMA|UTC\w*MMA)\b", code))


def render(table: list[Compiled]) -> str:
    """As a table in markdown."""
    lines = [
        "| sm | dtype | form | kernel | tile | warps | registers | shared, bytes | spills | tensor-core instructions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in table:
        cells = (x.architecture, x.dtype, x.form, x.kernel, x.tile, x.warps, x.registers, x.shared)
        lines.append("| " + " | ".join(map(str, (*cells, x.spills, x.tensor_cores))) + " |")
    return "\n".join(lines)


def main(
    sm: Annotated[list[int], typer.Option(help="compute capabilities")] = [80, 90, 100],  # noqa: B006
    form: Annotated[list[str], typer.Option(help="forms of scores")] = list(FORMS),  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="of queries, keys and values")] = list(DTYPES),  # noqa: B006
    width: Annotated[int, typer.Option(help="of a head")] = 64,
) -> None:
    """Print the table."""
    table = list(compile_all(sm, forms=form, dtypes=dtype, width=width, progress=note))
    typer.echo(render(table))


if __name__ == "__main__":
    run(main)
