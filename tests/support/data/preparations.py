"""Documents prepared, and what was written of them."""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_service.prepare.configuration import Preparation
from data_service.prepare.prepare import prepare
from data_service.prepare.statistics import Statistics
from tests.support.data import text_files
from tests.support.data.raw_text import ignore_progress


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Records as JSON lines; the input that reads them."""
    text_files.write_lines(path, records)
    return {"source": path.stem, "files": [str(path)]}


def write_texts(path: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Texts as JSON lines, with ids of the file's name and their number; the input that reads them."""
    records = ({"text": text, "id": f"{path.stem}-{i}"} for i, text in enumerate(texts))
    return write_lines(path, records) | {"fields": {"id": "id"}}


def made_up_texts(count: int, words: int, drawn: random.Random) -> list[str]:
    """So many texts of so many words each."""
    known = ["".join(drawn.choices("abcdefghijkl", k=drawn.randint(2, 9))) for _ in range(3000)]
    return [" ".join(drawn.choices(known, k=words)) for _ in range(count)]


def with_word_changed(text: str, drawn: random.Random) -> str:
    words = text.split(" ")
    words[drawn.randrange(len(words))] = "changed"
    return " ".join(words)


def run(
    inputs: Sequence[dict[str, Any]],
    stages: Sequence[dict[str, Any]],
    out: Path,
    *,
    workers: int = 1,
    chunk: int = 1 << 14,
) -> Statistics:
    made = Preparation.model_validate({"inputs": inputs, "stages": stages, "chunk_bytes": chunk})
    return prepare(made, str(out), workers, ignore_progress)


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Of a file or a folder of files; none where it is not there."""
    rows: list[dict[str, Any]] = pq.read_table(table).to_pylist() if table.exists() else []
    return rows
