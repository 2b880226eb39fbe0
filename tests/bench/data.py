"""Shards to masked microbatches in a trainer, against rows that were cut beforehand: python tests/bench/data.py URI.

Counted is the CPU time of every process (Ray's own, workers, the trainer's side), per million tokens. Ours reads
blocks, cuts, shuffles, masks and delivers through Ray. The peers (`data_peer.py`) read rows that were cut beforehand:
MosaicML's shards, masked by transformers' collator or by NumPy for a whole batch, or one local file, masked by NumPy.
All end with torch tensors of `ROWS` rows. Starting processes, opening streams and counting rows are left out. Ours and
each peer are measured in turn, so that other work on the machine meets both.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import ray
import torch
import typer
from data_peer import need_peer, peers, tree_seconds
from program import note, run
from synthetic import BLOCK_TOKENS, NEVER_MASKED, SPECIAL, VOCABULARY, write_corpus

from data_service.corpus.manifest import CorpusManifest
from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, FeedHandle, start_feed
from data_service.store.open import open_store
from launcher.runtime.rank.collate import to_batch

LENGTH = 512
ROWS = 64  # in a microbatch
_BLOCKS = 32
_EPOCHS = 4
_MEMORY = 1 << 30


@dataclass(frozen=True)
class Comparison:
    """CPU seconds per million tokens, in each round, ours and each peer's by name; and where the shards were."""

    where: str
    ours: list[float]
    peers: dict[str, list[float]]

    def ratios(self, peer: str) -> list[float]:
        """A peer's seconds over ours, round by round."""
        return [theirs / ours for theirs, ours in zip(self.peers[peer], self.ours, strict=True)]


def bench_data(uri: str, workers: int = 2, rounds: int = 3, progress: Callable[[str], None] = print) -> Comparison:
    """Measure with shards below `uri`, a folder or an s3:// address to write to.

    Raises:
        BenchError: the peer is not installed.
        StoreError: the address cannot be written to.
    """
    need_peer()
    progress(f"writing {_BLOCKS * BLOCK_TOKENS / 1e6:.0f} M tokens to {uri}")
    manifest = write_corpus(open_store(f"{uri}/corpus"), _BLOCKS)
    others = peers(f"{uri}/mds", LENGTH, ROWS)
    ours, theirs = list[float](), dict[str, list[float]]()
    for turn in range(rounds):
        progress(f"round {turn + 1} of {rounds}: maskfleet")
        ours.append(measure_ours(f"{uri}/corpus", manifest, workers))
        for peer in others:
            progress(f"round {turn + 1} of {rounds}: {peer.name}")
            theirs.setdefault(peer.name, []).append(peer.measure(workers))
    return Comparison(uri, ours, theirs)


def render(result: Comparison) -> str:
    """A few lines for people."""
    rows = [("maskfleet through Ray", result.ours, [1.0])]
    rows += [(name, seconds, result.ratios(name)) for name, seconds in result.peers.items()]
    return "\n".join(
        [
            f"rows of {LENGTH}, microbatches of {ROWS}, vocabulary {VOCABULARY:,}, shards on {result.where}",
            f"CPU seconds per million tokens, all processes; median (range) of {len(result.ours)} rounds",
            *(
                f"{name:<48}{statistics.median(seconds):>9.4f} ({min(seconds):.4f} to {max(seconds):.4f})"
                f"{statistics.median(ratios):>9.1f} x ({min(ratios):.1f} to {max(ratios):.1f})"
                for name, seconds, ratios in rows
            ),
        ]
    )


def measure_ours(uri: str, manifest: CorpusManifest, workers: int) -> float:
    """CPU seconds per million tokens through the Ray service on a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, _temp_dir=str(Path(folder)))
        try:
            feed = start_feed(FeedConfig(workers=workers, memory=_MEMORY))
            _read(feed, _spec(uri, manifest, seed=1), epochs=1)  # starts the workers
            before = tree_seconds()
            tokens = _read(feed, _spec(uri, manifest, seed=0), epochs=_EPOCHS)
            return (tree_seconds() - before) / (tokens / 1e6)
        finally:
            ray.shutdown()


def _read(feed: FeedHandle, spec: StreamSpec, epochs: int) -> int:
    """Read whole epochs in microbatches, as a trainer does; how many tokens."""
    client = FeedClient(feed, spec)
    count, device, tokens = client.samples_per_epoch, torch.device("cpu"), 0
    client.prefetch([(epoch, 0, count) for epoch in range(epochs)])
    for epoch in range(epochs):
        for start in range(0, count, ROWS):
            samples = client.read(epoch, start, min(start + ROWS, count))
            tokens += to_batch(samples, device).tokens.numel()
    client.close()
    return tokens


def _spec(uri: str, manifest: CorpusManifest, seed: int) -> StreamSpec:
    return StreamSpec(
        sources=(SourceSpec(name="random", uri=uri, manifest_fingerprint=manifest.fingerprint),),
        length=LENGTH,
        special=SPECIAL,
        never_masked=NEVER_MASKED,
        vocab_size=VOCABULARY,
        seed=seed,
        window=WindowSize(),
    )


def main(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Folder or s3:// address for shards.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes of each side.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Each measures ours and every peer.")] = 3,
) -> None:
    """Shards in object storage to masked microbatches, against rows that were cut beforehand.

    CPU seconds per million tokens, of all processes. Needs the peer installed; says how if it is not.
    """
    typer.echo(render(bench_data(uri, workers, rounds, note)))


if __name__ == "__main__":
    run(main)
