"""Renders an estimate as text, each figure with the arithmetic behind it, or as plain data for programs."""

from collections.abc import Iterator
from dataclasses import asdict
from math import prod

from data_service.ingest.options import BLOCK_TOKENS
from data_service.stream.statistics import ShuffleRadius
from encoder_core.train.zero_memory import STAGES
from launcher.output import hours_or_days, human_bytes, human_count, human_duration
from launcher.plan.estimate.data_needs import trained_token_lines
from launcher.plan.estimate.estimate import Estimate, goodput
from launcher.plan.estimate.throughput import PhaseTime, network_bytes
from launcher.runtime.capacity.devices import (
    CONTEXT_BYTES,
    FRAGMENTED_SHARE,
    GPU_TO_HOST_BYTES_S,
    LINK_SHARE,
    RESTART_S,
    SAVE_PAUSE_S,
    STORE_BYTES_S,
    usable_gpu_bytes,
)
from launcher.runtime.recipe.summary import momentum_matrix_shapes

_SUBJECT_COLUMNS, _RESULT_COLUMNS = 42, 14  # widths, in terminal columns, of a line's subject and of its result
_NODE_MTBF_HOURS = (24.0, 24.0 * 7, 24.0 * 30)  # hours between failures of a node, for which goodput is shown


def render_text(estimate: Estimate) -> str:
    sections = [_title_lines(estimate)]
    sections += [_flops_lines(estimate, phase) for phase in estimate.phases]
    sections += [
        _memory_lines(estimate),
        _configured_memory_lines(estimate),
        _data_lines(estimate),
        _checkpoint_lines(estimate),
        _whole_run_lines(estimate),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _format_line(subject: str, formula: str, result: str) -> str:
    return f"  {subject:<{_SUBJECT_COLUMNS}} {result:>{_RESULT_COLUMNS}}  = {formula}".rstrip()


def _title_lines(e: Estimate) -> list[str]:
    cluster, gpu = e.cluster, e.cluster.gpu
    lines = [
        f"{e.recipe.name}: {e.parameters:,} parameters, on {cluster.nodes} x {cluster.gpus_per_node} {gpu.name}",
        f"{gpu.name}: {gpu.peak / 1e12:,.0f} TFLOPS dense {gpu.half}, {human_bytes(gpu.memory)}; "
        f"{e.recipe.precision}, ZeRO {e.recipe.zero}, activation checkpointing "
        f"{'on' if e.recipe.activation_checkpointing else 'off'}",
    ]
    if gpu.half != e.recipe.precision and e.recipe.precision == "bf16":
        lines.append(f"note: a {gpu.name} has no bf16, so the recipe does not run on it; estimated for {gpu.half}")
    return lines


def _flops_lines(e: Estimate, phase: PhaseTime) -> list[str]:
    shape, backward = phase.shape, phase.model - phase.forward
    lines = [
        f"FLOPs of a microbatch: {shape.rows} rows x {shape.length} tokens, {shape.targets_per_row} targets a row"
        f"{', causal' if shape.causal else ''} "
        f"({phase.steps:,} steps of {phase.rows:,} rows)",
        _format_line(
            "forward + backward",
            f"{_teraflop_text(phase.forward)} + {_teraflop_text(backward)}, counted",
            _teraflop_text(phase.model),
        ),
        _format_line(
            "each token",
            f"{phase.model:,} / {shape.tokens:,}",
            f"{phase.model / shape.tokens / 1e9:.3f} GFLOP",
        ),
    ]
    if phase.executed > phase.model:
        twice = "layers that are recomputed, or a first pass for vectors"
        lines.append(_format_line("computed twice", twice, _teraflop_text(phase.executed - phase.model)))
    return [*lines, *_step_time_lines(e, phase)]


def _step_time_lines(e: Estimate, phase: PhaseTime) -> Iterator[str]:
    cluster, share, ranks = e.cluster, phase.utilisation, e.cluster.ranks
    bf16 = e.recipe.precision == "bf16"
    peak = f"{(cluster.gpu.peak if bf16 else cluster.gpu.peak_fp32) / 1e12:,.1f} TFLOPS"
    moved = network_bytes(e.parameters, ranks, e.recipe, phase.rounds)
    network = f"{moved / 1e9:.2f} GB / ({LINK_SHARE} x {cluster.slowest_link_rate / 1e9:.1f} GB/s)"
    tokens = f"{human_count(phase.tokens_per_second)}/s"
    every = (phase.compute, phase.optimizer)
    parts = [*[part for part in every if part], phase.network]
    for line in (
        ("rounds, of the busiest rank", f"{phase.microbatches:,} / {ranks}, rounded up", f"{phase.rounds}"),
        (f"utilisation, {'measured' if share.measured else 'assumed'}", share.source, f"{share.share:.1%}"),
        (
            "computing",
            f"{phase.rounds} x {_teraflop_text(phase.executed)} / ({peak} x {share.share:.3f})",
            f"{phase.compute:.4f} s",
        ),
        *_muon_lines(e, phase),
        ("network, not hidden", network, f"{phase.network:.4f} s"),
        ("a step", f"{' + '.join(f'{part:.4f}' for part in parts)} s", f"{phase.step_seconds:.4f} s"),
        ("tokens", f"{phase.rows:,} x {phase.length} / {phase.step_seconds:.4f} s", tokens),
    ):
        yield _format_line(*line)
    idle = 1 - phase.microbatches / (phase.rounds * ranks)
    if idle > 0.01:
        yield _format_line("ranks that idle", "microbatches do not divide evenly among ranks", f"{idle:.0%} of time")


def _muon_lines(e: Estimate, phase: PhaseTime) -> Iterator[tuple[str, str, str]]:
    """Yield the line about Muon's orthogonalisation in a step, if there is any."""
    if phase.optimizer:
        peak = f"{e.cluster.gpu.peak / 1e12:,.1f} TFLOPS"
        formula = f"{_teraflop_text(phase.orthogonalising)} a rank / ({peak} x {phase.utilisation.share:.3f})"
        yield "orthogonalising", formula, f"{phase.optimizer:.4f} s"


def _memory_lines(e: Estimate) -> list[str]:
    """Return the table of GiB by stage and microbatch."""
    left = usable_gpu_bytes(e.cluster.gpu.memory)
    whole = f"{human_bytes(e.cluster.gpu.memory)} x {1 - FRAGMENTED_SHARE:.2f} - {human_bytes(CONTEXT_BYTES)}"
    rows = sorted({fit.rows for fit in e.fits})
    lines = [
        f"Memory of a GPU in GiB, rows of {e.phase_with_most_memory.length}; * does not fit",
        _format_line("usable", f"{whole}, for fragmentation, CUDA and NCCL (assumed)", human_bytes(left)),
        "  microbatch" + "".join(f"{count:>9}" for count in rows) + "   largest that fits",
    ]
    for stage in STAGES:
        fits = [fit for fit in e.fits if fit.stage == stage]
        if not fits:
            lines.append(f"  ZeRO {stage}      bf16 needs stage 1, 2 or 3")
            continue
        cells = "".join(f"{fit.total_bytes / (1 << 30):>8.1f}{' ' if fit.fits else '*'}" for fit in fits)
        largest = e.largest_microbatch(stage)
        lines.append(f"  ZeRO {stage}    {cells}   {largest.rows if largest else 'none'}")
    if e.automatic:
        taken = ", ".join(f"{count:,}" for count in e.recipe.microbatch_rows_by_phase)
        lines.append(f"  microbatch: auto takes {taken} rows at ZeRO {e.recipe.zero}: what fits, in equal rounds")
    if not any(fit.fits for fit in e.fits):
        lines.append(f"  Not even one row fits on a {e.cluster.gpu.name}, at any stage{_memory_hint(e)}.")
    elif e.configured_memory is not None and not e.configured_memory.fits:
        lines.append(
            f"  The recipe's ZeRO {e.recipe.zero} with {e.configured_memory.rows} rows does not fit{_memory_hint(e)}."
        )
    return lines


def _memory_hint(e: Estimate) -> str:
    if e.recipe.activation_checkpointing:
        return ": choose a GPU with more memory, a smaller microbatch or a higher stage"
    return ": try --set activation_checkpointing=true, a smaller microbatch or a higher stage"


def _configured_memory_lines(e: Estimate) -> list[str]:
    fit = e.configured_memory
    if fit is None:
        return [f"The recipe's own setting, {e.recipe.precision} at ZeRO {e.recipe.zero}, is not supported"]
    lines = [f"Memory as configured: ZeRO {fit.stage}, microbatch {fit.rows}"]
    lines += [_format_line(part.what, part.formula, human_bytes(part.bytes)) for part in fit.parts]
    return [*lines, _format_line("in all", "the sum", human_bytes(fit.total_bytes))]


def _data_lines(e: Estimate) -> list[str]:
    data = e.data
    return [
        "Data",
        *(_format_line(*line) for line in trained_token_lines(e.total_tokens, e.text_bytes)),
        _format_line("tokens", "the fastest phase", f"{human_count(data.tokens)}/s"),
        _format_line(
            "cores busy",
            f"{data.tokens:,.0f}/s x {data.cpu:.3f} CPU s a million tokens (measured)",
            f"{data.busy_cores:.2f}",
        ),
        _format_line("data workers", "twice that, rounded up", f"{data.workers}"),
        _format_line(
            "from the object store",
            f"{data.tokens:,.0f}/s x {data.bytes / data.tokens:.2f} B",
            f"{data.bytes / 1e6:.1f} MB/s",
        ),
        _format_line("requests", f"one for each block of {BLOCK_TOKENS:,} tokens", f"{data.requests:.2f}/s"),
        *_shuffle_lines(e.radius),
    ]


def _shuffle_lines(radius: ShuffleRadius | None) -> Iterator[str]:
    if radius is None:
        return
    batch = f"blocks from which {radius.rows:,} rows come, at most {radius.largest:.2%} from one block"
    yield _format_line("regions of a batch", batch, f"{radius.regions:,.0f}")
    yield _format_line("beside their continuation", "rows whose next text is in the batch", f"{radius.continued:.2%}")
    yield _format_line("read for a byte used", "a block in two windows is read twice", f"{radius.amplification:.3f}")


def _checkpoint_size_formula(e: Estimate) -> str:
    single = sum(prod(shape) for shape in momentum_matrix_shapes(e.recipe))
    less = f" - 4 B x {single:,} of one moment" if single else ""
    return f"{16 if e.recipe.average else 12} B x {e.parameters:,}{less}"


def _checkpoint_lines(e: Estimate) -> list[str]:
    c, ranks, nodes = e.checkpoints, e.cluster.ranks, e.cluster.nodes
    size = f"{c.bytes / 1e9:.2f} GB"
    lines = [
        "Checkpoints (d: time that a save blocks, M: time between failures, t: interval between saves)",
        _format_line("size", _checkpoint_size_formula(e), size),
        _format_line(
            "training waits, d",
            f"{SAVE_PAUSE_S} s + {size} / {ranks} ranks / {GPU_TO_HOST_BYTES_S / 1e9:.0f} GB/s (assumed)",
            f"{c.saving.blocked:.3f} s",
        ),
        _format_line(
            "upload, behind training",
            f"{size} / {nodes} nodes / {STORE_BYTES_S / 1e9:.0f} GB/s (assumed)",
            f"{c.saving.behind:.1f} s",
        ),
        _format_line(
            "failure to next step",
            f"{RESTART_S:.0f} s (assumed) + loading at the upload's rate",
            f"{c.saving.restart:.1f} s",
        ),
        _format_line("M of the cluster", f"{e.cluster.mtbf / 3600:,.0f} h / {nodes} nodes", f"{c.mtbf / 3600:,.1f} h"),
        _format_line("interval, Young 1974", "sqrt(2 d M)", human_duration(c.young)),
        _format_line("interval, Daly 2006", "Young x (1 + sqrt(d / 2M) / 3 + d / 18M) - d", human_duration(c.daly)),
        _format_line("best interval", "Daly's, at least one upload", human_duration(c.best)),
        _format_line("goodput at best", "t / (M e^((restart + upload) / M) (e^((t + d) / M) - 1))", f"{c.goodput:.2%}"),
        _format_line("goodput at the recipe's interval", f"t = {human_duration(c.chosen)}", f"{c.goodput_chosen:.2%}"),
    ]
    for hours in _NODE_MTBF_HOURS:
        share = goodput(c.saving, c.chosen, hours * 3600 / nodes)
        lines.append(_format_line(f"  if a node lasts {hours:,.0f} h", "the same", f"{share:.2%}"))
    return lines


def _phase_seconds_formula(phase: PhaseTime) -> str:
    rising = f" - {phase.spared:,.0f} s of smaller batches" if phase.spared else ""
    return f"{phase.steps:,} x {phase.step_seconds:.4f} s{rising}"


def _whole_run_lines(e: Estimate) -> list[str]:
    work = sum(phase.total_seconds for phase in e.phases)
    sums = " + ".join(_phase_seconds_formula(phase) for phase in e.phases)
    if e.seconds == float("inf"):
        return [
            "The whole run",
            _format_line("training", sums, human_duration(work)),
            "  never ends: failures are too frequent",
        ]
    return [
        "The whole run (without evaluation and idle machines)",
        _format_line("training", sums, hours_or_days(work)),
        _format_line(
            "wall time",
            f"{hours_or_days(work)} / {e.checkpoints.goodput_chosen:.4f}",
            hours_or_days(e.seconds),
        ),
        _format_line("GPU-hours", f"{e.cluster.ranks} x {e.seconds / 3600:,.1f} h", f"{e.gpu_hours:,.0f}"),
    ]


def _teraflop_text(flops: float) -> str:
    return f"{flops / 1e12:.3f} TFLOP"


def estimate_figures(e: Estimate) -> dict[str, object]:
    """Return every figure of the estimate for programs, in bytes, seconds and shares. `largest_microbatch` is null for
    a stage that the recipe's precision rules out, or where not even one row fits."""
    return {
        "recipe": e.recipe.name,
        "nodes": e.cluster.nodes,
        "gpus_per_node": e.cluster.gpus_per_node,
        "gpu": asdict(e.cluster.gpu),
        "parameters": e.parameters,
        "tokens": e.total_tokens,
        "phases": [
            asdict(phase) | {"step": phase.step_seconds, "tokens_per_second": phase.tokens_per_second}
            for phase in e.phases
        ],
        "memory": [
            {"zero": fit.stage, "microbatch": fit.rows, "bytes": fit.total_bytes, "fits": fit.fits} for fit in e.fits
        ],
        "microbatch": list(e.recipe.microbatch_rows_by_phase),
        "largest_microbatch": {
            str(stage): fit.rows if (fit := e.largest_microbatch(stage)) is not None else None for stage in STAGES
        },
        "data": asdict(e.data),
        "shuffle": None if e.radius is None else asdict(e.radius),
        "checkpoints": asdict(e.checkpoints),
        "seconds": e.seconds if e.seconds != float("inf") else None,
        "gpu_hours": e.gpu_hours if e.seconds != float("inf") else None,
    }
