"""The peers of `data.py`: rows that were cut beforehand, in MosaicML's shards or in one file, masked by transformers'
collator or by a few lines of NumPy. All in DataLoader workers, shuffled, to torch tensors.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from program import BenchError
from synthetic import BLOCK_TOKENS, SPECIAL, VOCABULARY, block
from torch.utils.data import DataLoader, Dataset

_BLOCKS = 64  # more rows than are read, as a worker that ends takes its seconds with it
_WARM_UP = 10  # batches
_BATCHES = 250


def tree_seconds() -> float:
    """User and system seconds so far of this process and of all that descend from it and live."""
    this = psutil.Process()
    return sum(map(_seconds, (this, *this.children(recursive=True))))


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def need_peer() -> None:
    """Raises BenchError where the peer cannot be imported."""
    if find_spec("streaming") is None or find_spec("torchvision") is None:
        raise BenchError(
            "the peer, MosaicML Streaming, is not installed",
            remedy="pip install --no-deps mosaicml-streaming Brotli catalogue python-snappy cramjam xxhash zstd "
            "matplotlib, and torchvision built for this torch (it is imported, not used: an empty module with "
            "datasets.VisionDataset and transforms.functional.to_tensor does)",
        )


Collate = Callable[[list[dict[str, Any]]], Any]


@dataclass(frozen=True)
class Peer:
    """A peer that reads rows of `length` tokens, `rows` in a microbatch. `uri`: where its shards lie, if it has any."""

    name: str
    uri: str | None
    collate: Collate
    length: int
    rows: int

    def measure(self, workers: int) -> float:
        """CPU seconds per million tokens, of all processes."""
        with self._dataset() as dataset:
            shuffled = self.uri is None  # MosaicML's shuffles by itself
            loader = DataLoader(
                dataset,
                batch_size=self.rows,
                num_workers=workers,
                collate_fn=self.collate,
                shuffle=shuffled,
            )
            batches = iter(loader)
            for _ in islice(batches, _WARM_UP):
                pass
            before = tree_seconds()
            tokens: int = sum(batch["input_ids"].numel() for batch in islice(batches, _BATCHES))
            taken = tree_seconds() - before
            del batches  # ends the workers, which write below the folder
            return taken / (tokens / 1e6)

    @contextmanager
    def _dataset(self) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(prefix="maskfleet-bench-", ignore_cleanup_errors=True) as folder:
            if self.uri is None:
                path = Path(folder) / "rows"
                np.concatenate([row[None] for row in _cut_rows(self.length)]).tofile(path)
                yield _RowsInAFile(path, self.length)
                return
            from streaming import StreamingDataset

            yield StreamingDataset(remote=self.uri, local=folder, shuffle=True, batch_size=self.rows)


def peers(uri: str, length: int, rows: int) -> list[Peer]:
    """Return all peers, after writing MosaicML's shards to `uri`."""
    _write(uri, length)
    collator, special = _mlm_collator(), [1, *[0] * (length - 2), 1]

    def by_transformers(examples: list[dict[str, Any]]) -> Any:
        marked = [{"input_ids": e["tokens"].astype("int64"), "special_tokens_mask": special} for e in examples]
        return collator(marked)

    return [
        Peer("MosaicML Streaming, transformers' collator", uri, by_transformers, length, rows),
        Peer("MosaicML Streaming, masked by NumPy", uri, masked_by_numpy, length, rows),
        Peer("rows in one local file, masked by NumPy", None, masked_by_numpy, length, rows),
    ]


def _mlm_collator() -> Any:
    """transformers' collator, with a vocabulary of our size. Its random words are drawn from all of it.

    Raises:
        BenchError: transformers is not installed.
    """
    try:
        import tokenizers
        import transformers
    except ImportError as error:
        raise BenchError(
            "the peer, transformers, is not installed",
            remedy="pip install -c infra/constraints.txt transformers",
        ) from error
    names = {SPECIAL.cls: "<s>", SPECIAL.pad: "<pad>", SPECIAL.sep: "</s>", SPECIAL.unk: "<unk>"}
    names[SPECIAL.mask] = "<mask>"
    pieces = {names.get(i, f"piece{i}"): i for i in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(pieces, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)


def masked_by_numpy(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """BERT's masks for a whole batch at once: 15 % of the tokens that are not special, 80/10/10."""
    rng = np.random.default_rng()
    tokens = np.stack([example["tokens"] for example in examples]).astype(np.int64)
    chosen = rng.random(tokens.shape) < 0.15
    chosen[:, [0, -1]] = False
    labels = np.where(chosen, tokens, -100)
    way = rng.random(tokens.shape)
    tokens[chosen & (way < 0.8)] = SPECIAL.mask
    random = chosen & (way >= 0.9)
    tokens[random] = rng.integers(5, VOCABULARY, int(random.sum()))
    return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


class _RowsInAFile(Dataset[dict[str, Any]]):
    """Rows of one length, read by number from a file that is mapped into memory."""

    def __init__(self, path: Path, length: int) -> None:
        self._rows = np.memmap(path, np.uint16, mode="r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self._rows[index]}


def _cut_rows(length: int) -> Iterator[np.ndarray]:
    """Yield random text, cut into full rows with their special tokens in place."""
    room = length - 2
    for seed in range(_BLOCKS):
        text = block(seed).tokens
        for start in range(0, BLOCK_TOKENS - room, room):
            row = text[[0, *range(start, start + room), 0]]
            row[0], row[-1] = SPECIAL.cls, SPECIAL.sep
            yield row


def _write(uri: str, length: int) -> None:
    from streaming import MDSWriter

    with (
        tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder,
        MDSWriter(out=(str(Path(folder) / "mds"), uri), columns={"tokens": f"ndarray:uint16:{length}"}) as writer,
    ):
        for row in _cut_rows(length):
            writer.write({"tokens": row})
