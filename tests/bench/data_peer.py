"""The peer of `data.py`: MosaicML Streaming with transformers' MLM collator."""

import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from cpu import tree_seconds
from masking import mlm_collator
from program import BenchError
from synthetic import BLOCK_TOKENS, SPECIAL, random_block

_BLOCKS = 16
_WARM_UP = 10  # batches
_BATCHES = 250


def need_peer() -> None:
    """Raises BenchError where the peer cannot be imported."""
    if find_spec("streaming") is None or find_spec("torchvision") is None:
        raise BenchError(
            "the peer, MosaicML Streaming, is not installed",
            remedy="pip install --no-deps mosaicml-streaming Brotli catalogue python-snappy cramjam xxhash zstd "
            "matplotlib, and torchvision built for this torch (it is imported, not used: an empty module with "
            "datasets.VisionDataset and transforms.functional.to_tensor does)",
        )


def measure_peer(uri: str, length: int, rows: int, workers: int, left_out: frozenset[int]) -> float:
    """CPU seconds per million tokens of rows from shards at `uri`, which are written first."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    _write(uri, length)
    collator = mlm_collator()
    special = [1, *[0] * (length - 2), 1]

    def collate(examples: list[dict[str, Any]]) -> Any:
        marked = [
            {"input_ids": e["tokens"].astype("int64"), "special_tokens_mask": special} for e in examples
        ]
        return collator(marked)

    with tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder:
        dataset = StreamingDataset(remote=uri, local=folder, shuffle=True, batch_size=rows)
        batches = iter(DataLoader(dataset, batch_size=rows, num_workers=workers, collate_fn=collate))
        for _ in islice(batches, _WARM_UP):
            pass
        before = tree_seconds(left_out)
        tokens: int = sum(batch["input_ids"].numel() for batch in islice(batches, _BATCHES))
        return (tree_seconds(left_out) - before) / (tokens / 1e6)


def _write(uri: str, length: int) -> None:
    """Random text, cut into full rows with their special tokens in place."""
    from streaming import MDSWriter

    room = length - 2
    with (
        tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder,
        MDSWriter(
            out=(str(Path(folder) / "mds"), uri), columns={"tokens": f"ndarray:uint16:{length}"}
        ) as writer,
    ):
        for seed in range(_BLOCKS):
            text = random_block(seed).tokens
            for start in range(0, BLOCK_TOKENS - room, room):
                row = text[[0, *range(start, start + room), 0]]
                row[0], row[-1] = SPECIAL.cls, SPECIAL.sep
                writer.write({"tokens": row})
