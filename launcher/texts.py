"""Raw text as the commands take it: a sample to learn a tokenizer from, and how many hands it needs."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_service.errors import InputError
from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import plan_splits

_SMALL = 64 << 20  # bytes


def sample_texts(inputs: Sequence[str], options: BuildOptions, limit: int) -> Iterator[str]:
    """Documents of the inputs, about `limit` bytes of them, from all over.

    Beyond the limit, evenly spaced splits are read whole. Which ones depends on names and sizes only.

    Raises:
        InputError: nothing there, or text that cannot be read. StoreError.
    """
    splits = plan_splits(list_inputs(list(inputs)).files, options)
    total = sum(split.size for split in splits)
    wanted = max(1, min(len(splits), round(len(splits) * limit / max(total, 1))))
    for index in range(wanted):
        for document in read_documents(splits[index * len(splits) // wanted], options):
            yield document.text


def automatic_workers(inputs: Sequence[str]) -> int:
    """How many processes to build a corpus with: Ray takes seconds to start, so a small input takes one."""
    size = sum(file.size for file in list_inputs(list(inputs)).files)
    return 1 if size < _SMALL else len(os.sched_getaffinity(0))


def read_terms(path: Path) -> list[str]:
    """The lines of a UTF-8 file. Raises InputError: no such file, or other bytes."""
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", remedy="give a UTF-8 text file with one word a line"
        ) from error
