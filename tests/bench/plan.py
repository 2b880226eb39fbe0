"""What it costs to know where every sample of a large corpus is: python tests/bench/plan.py.

The plan and the seeks are measured on the manifest of a corpus that does not exist. What needs data, the counting
pass and the first batch, is measured apart on a small real one.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from program import note, run
from synthetic import (
    BLOCK_TOKENS,
    NEVER_MASKED,
    SPECIAL,
    VOCABULARY,
    synthetic_manifest,
    write_corpus,
)

from data_service.corpus.manifest_file import load_manifest, save_manifest
from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.store.open import open_store
from data_service.stream.counts import count_range, count_rows
from data_service.stream.plan import StreamPlan
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream

_LENGTH = 512
_BATCH = 8192
_SEEKS = 200
_EPOCHS = 40
_FEWEST_ROWS = BLOCK_TOKENS // _LENGTH  # of a block


@dataclass(frozen=True)
class Cost:
    """Seconds, unless named otherwise.

    Attributes:
        tokens, samples: of the synthetic corpus.
        manifest: reading its manifest, as a worker does.
        memory: bytes by which a process grows that reads the manifest, makes the plan and seeks in two readings.
        plan: making the plan, counts known.
        seeks: finding the block and row of a random sample of a random epoch, each.
        counted_per_second: tokens a second on one core of the counting pass.
        first_batch: opening a real corpus of `real_tokens`, counts known, to its first batch.
    """

    tokens: int
    samples: int
    manifest: float
    memory: int
    plan: float
    seeks: tuple[float, ...]
    counted_per_second: float
    real_tokens: int
    first_batch: float


def bench_plan(
    tokens: int = 500_000_000_000, real_blocks: int = 32, progress: Callable[[str], None] = print
) -> Cost:
    """Measure: the plan of `tokens` that do not exist, and `real_blocks` blocks that do."""
    with tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder:
        progress(f"writing the manifest of {tokens:,} tokens")
        save_manifest(open_store(Path(folder) / "synthetic"), synthetic_manifest(tokens))
        memory = _measure_growth(str(Path(folder) / "synthetic"))
        manifest, plan, made = _make_plan(str(Path(folder) / "synthetic"))
        progress("seeking")
        seeks = _seek(made)
        progress(f"writing a real corpus of {real_blocks * BLOCK_TOKENS:,} tokens")
        real = str(Path(folder) / "real")
        write_corpus(open_store(real), real_blocks)
        counted, first_batch = _read_first(_spec(real), str(Path(folder) / "cache"), real_blocks)
    samples = made.epoch_layout.samples_per_epoch
    return Cost(
        tokens,
        samples,
        manifest=manifest,
        memory=memory,
        plan=plan,
        seeks=seeks,
        counted_per_second=counted,
        real_tokens=real_blocks * BLOCK_TOKENS,
        first_batch=first_batch,
    )


def render(cost: Cost) -> str:
    """A few lines for people."""
    counting = cost.tokens / cost.counted_per_second
    rows = [
        ("read the manifest", f"{cost.manifest:.2f} s"),
        ("memory of manifest, plan and two readings", f"{cost.memory / 1e6:.0f} MB"),
        ("make the plan, counts known", f"{cost.plan:.2f} s"),
        ("seek to a random sample, median", f"{statistics.median(cost.seeks) * 1e3:.2f} ms"),
        ("seek to a random sample, slowest", f"{max(cost.seeks) * 1e3:.2f} ms"),
        ("counting pass, once a corpus", f"{cost.counted_per_second / 1e6:.0f} M tokens/s a core"),
        ("  so for this corpus", f"{counting:.0f} core-seconds and its bytes read once"),
        (
            f"open {cost.real_tokens / 1e6:.0f} M real tokens to the first {_BATCH} samples",
            f"{cost.first_batch:.2f} s",
        ),
    ]
    head = f"{cost.tokens / 1e9:g} billion tokens, {cost.samples:,} rows of up to {_LENGTH}, windows of 16 x {_BATCH}"
    return "\n".join([head, *(f"{name:<58}{value}" for name, value in rows)])


def _make_plan(uri: str) -> tuple[float, float, StreamPlan]:
    """Seconds to read the manifest, seconds to make the plan, and the plan."""
    spec = _spec(uri)
    began = time.perf_counter()
    corpora = Corpora(spec)
    read = time.perf_counter()
    # Whole-sentence rows are a few per cent shorter than full ones; which is which does not matter to the plan.
    counts = tuple(table.tokens // (_LENGTH - 25) + 1 for table in corpora.tables)
    plan = StreamPlan(spec, corpora.tables, counts)
    return read - began, time.perf_counter() - read, plan


def _measure_growth(uri: str) -> int:
    """Return by how many bytes a process of its own grows: at its highest, and with its libraries loaded before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_grow, uri).result()


def _grow(uri: str) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = _highest()
    _, _, plan = _make_plan(uri)
    for epoch in range(2):
        plan.origin(epoch, 0)
    return _highest() - before


def _highest() -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def _seek(plan: StreamPlan) -> tuple[float, ...]:
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(_SEEKS):
        epoch, sample = int(rng.integers(_EPOCHS)), int(rng.integers(plan.epoch_layout.samples_per_epoch))
        began = time.perf_counter()
        plan.origin(epoch, sample)
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def _read_first(spec: StreamSpec, cache: str, blocks: int) -> tuple[float, float]:
    """Tokens a second of the counting pass, and seconds to a first batch with the counts kept."""
    corpora = Corpora(spec)
    began = time.process_time()
    count_range(corpora, 0, 0, blocks)
    rate = blocks * BLOCK_TOKENS / (time.process_time() - began)
    count_rows(corpora, open_store(cache))
    began = time.perf_counter()
    Stream(spec, cache=open_store(cache)).read(0, 0, min(_BATCH, _FEWEST_ROWS * blocks))
    return rate, time.perf_counter() - began


def _spec(uri: str) -> StreamSpec:
    return StreamSpec(
        sources=(
            SourceSpec(name="text", uri=uri, manifest_fingerprint=load_manifest(open_store(uri)).fingerprint),
        ),
        length=_LENGTH,
        special=SPECIAL,
        never_masked=NEVER_MASKED,
        vocab_size=VOCABULARY,
        seed=0,
        window=WindowSize(samples=16 * _BATCH),
    )


def main(
    tokens: Annotated[
        int, typer.Option(min=1_000_000, help="Tokens of the synthetic manifest; no data is behind it.")
    ] = 500_000_000_000,
) -> None:
    """What a data plan costs at scale: making it, a seek to any sample, the counting pass, the first batch."""
    typer.echo(render(bench_plan(tokens, progress=note)))


if __name__ == "__main__":
    run(main)
