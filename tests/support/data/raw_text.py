"""Raw text in every form that `build_corpus` reads, a tokenizer for it, and the corpus that is built of it."""

import pydoc_data.topics
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_service.corpus.corpus import Corpus, SplitName
from data_service.corpus.manifest import BlockTable, CorpusManifest
from data_service.corpus.reader import read_block
from data_service.corpus.sidecar import DocumentOrigin, read_origins
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Progress, ReportProgress
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.text_files import write_lines

DOCUMENTS = list(dict.fromkeys(topic for _, topic in sorted(pydoc_data.topics.topics.items())))

# Small enough that half a megabyte of text makes many splits and many blocks.
SMALL = BuildOptions(split_bytes=100_000, block_tokens=8_000, heldout_fraction=0.1)


@cache
def small_tokenizer() -> Tokenizer:
    """Byte-level BPE of 600 ids."""
    return train_tokenizer("byte_bpe", iter(DOCUMENTS[:20]), 600)


def tokenizer_folder(folder: Path) -> str:
    """The small tokenizer's files, written to a folder; its URI."""
    save_tokenizer(small_tokenizer(), str(folder))
    return str(folder)


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    """One object a line, compressed as the name says."""
    return write_lines(path, ({"id": i, field: text} for i, text in enumerate(documents)))


def write_parquet(path: Path, documents: list[str], rows_a_group: int = 10) -> Path:
    """A column `text`, in row groups of a few rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": documents}), path, row_group_size=rows_a_group)
    return path


def write_mixture(folder: Path) -> Path:
    """All of `DOCUMENTS`, some in every form, with copies within and across files."""
    write_jsonl(folder / "a.jsonl", DOCUMENTS[:25] + DOCUMENTS[:3])
    write_jsonl(folder / "b.jsonl.gz", DOCUMENTS[25:35] + DOCUMENTS[10:12])
    write_jsonl(folder / "c.jsonl.zst", DOCUMENTS[35:45])
    write_parquet(folder / "d.parquet", DOCUMENTS[40:60])
    for number, text in enumerate(DOCUMENTS[58:]):
        (folder / f"e-{number:03d}.txt").write_text(text, "utf-8")
    return folder


def ignore_progress(progress: Progress) -> None:
    """A report to nobody."""


def build(
    inputs: Path, output: Path | str, options: BuildOptions = SMALL, progress: ReportProgress = ignore_progress
) -> CorpusManifest:
    """A corpus of everything in a folder; the tokenizer's folder is put beside it."""
    return build_corpus([str(inputs)], str(output), tokenizer_folder(inputs.parent / "tokenizer"), options, progress)


def decoded_documents(store: Store, table: BlockTable) -> list[str]:
    """The texts of a split, as the small tokenizer's tokens spell them."""
    tokenizer, blocks = small_tokenizer(), (read_block(store, table, index) for index in range(len(table)))
    return [
        tokenizer.decode(block.tokens[a:b]) for block in blocks for a, b in pairwise(block.sentences[block.documents])
    ]


def origins_of(corpus: Corpus, split: SplitName = "train") -> Iterator[DocumentOrigin]:
    """What is known of all documents of a split."""
    for shard in corpus.table(split).shards:
        yield from read_origins(corpus, split, shard)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every object stored below a folder, by its key. What a killed writer left half-written is no object."""
    store = open_store(str(folder))
    return {entry.key: store.get(entry.key) for entry in store.list()}


class Killed(BaseException):
    """Stands for the death of the process: nothing of a build may catch it."""


def killed_after(reports: int) -> Callable[[Progress], None]:
    """For a build: it ends after so many reports of progress."""
    left = reports

    def report(progress: Progress) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed(progress.stage)

    return report


def killed_at(stage: str, done: int) -> Callable[[Progress], None]:
    """For a build: a report of progress that ends it at this point."""

    def report(progress: Progress) -> None:
        if progress.stage == stage and progress.done == done:
            raise Killed

    return report
