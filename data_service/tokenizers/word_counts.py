"""Counts the words of any amount of text in bounded memory.

Each process counts in a table. A full table is spilled to 64 files in a temporary folder, chosen by the words' hashes.
In the end the counts are added up file by file, and the most frequent words are kept. So the result does not depend on
the order of the text or on the number of processes.
"""

import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from data_service.errors import TokenizerError
from data_service.processes import temporary_folder
from data_service.store.local import report_full_disk
from data_service.tokenizers.files import TRAINING_REPORT
from data_service.tokenizers.word_splits import WordSplitter, split_text

_MAX_PROCESSES = 4  # with a table of up to 0.7 GB each; one reading process can feed no more
_MAX_TABLE_PIECES = 2_000_000  # largest number of pieces in a table, at about 200 bytes each
_MAX_SHORT_PIECE_CHARACTERS = 64  # a longer piece fills the table like several pieces of this length
_SPILL_FILE_BITS = 6  # bits of a word's hash that select its file
_MAX_FILE_BYTES = 1 << 30  # larger spill files are divided by the next bits of the hash
_BATCH_CHARACTERS = 1 << 20  # characters of text that are sent to a counting process at once


@dataclass(frozen=True)
class WordCounts:
    """The most frequent words of a text.

    Attributes:
        words: the distinct words, sorted.
        counts: [words] int64, number of occurrences of each.
        occurrences: number of words of the whole text.
        left_out: number of occurrences of words that were too rare to be kept.
    """

    words: list[str]
    counts: NDArray[np.int64]
    occurrences: int
    left_out: int

    def training_report_files(self) -> dict[str, bytes]:
        """Return {name: content} of the tokenizer's report on the numbers of words in its training text."""
        report = {
            "words": self.occurrences,
            "left_out": self.left_out,
            "distinct_words_learnt_from": len(self.words),
        }
        return {TRAINING_REPORT: json.dumps(report, indent=2).encode() + b"\n"}


def word_code_points(words: Iterable[str]) -> NDArray[np.uint32]:
    """Return the code points of all words, with a line feed after each word."""
    return np.frombuffer("".join(f"{word}\n" for word in words).encode("utf-32-le"), np.uint32)


def count_words(
    texts: Iterable[str], make_splitter: Callable[[], WordSplitter], max_bytes: int, workers: int = 1
) -> WordCounts:
    """Count words, and keep the most frequent ones; equally frequent ones are kept in sorted order.

    Args:
        texts: documents or lines, read once.
        make_splitter: function that returns the splitter; must be picklable.
        max_bytes: largest size of the words to keep, in bytes plus one for each word.
        workers: number of counting processes, at most four are used; 1: count in this process.

    Raises:
        TokenizerError: a counting process died.
        OutOfSpace: the temporary folder is full. Errors of `texts` are raised unchanged.
    """
    with temporary_folder("words") as folder, report_full_disk(folder):
        if workers > 1:
            _count_in_processes(texts, make_splitter, folder, min(workers, _MAX_PROCESSES))
        else:
            table = _SpillingCounter(make_splitter(), folder, 0)
            for text in texts:
                table.count_text(text)
            table.write_counts()
        return _most_frequent(_merge_spilled(folder), max_bytes)


class _SpillingCounter:
    """Counts words, and spills the counts to files in `folder`. `number`: the process's number, names its files."""

    def __init__(self, splitter: WordSplitter, folder: Path, number: int) -> None:
        self._splitter, self._folder, self._number = splitter, folder, number
        self._pieces: Counter[str] = Counter()
        self._long = 0  # number of characters of all pieces that are not short

    def count_text(self, text: str) -> None:
        for pieces, longest in split_text(text, self._splitter):
            self._pieces.update(pieces)
            if longest > _MAX_SHORT_PIECE_CHARACTERS:
                self._long += sum(len(piece) for piece in pieces if len(piece) > _MAX_SHORT_PIECE_CHARACTERS)
            if len(self._pieces) + self._long // _MAX_SHORT_PIECE_CHARACTERS > _MAX_TABLE_PIECES:
                self.write_counts()

    def write_counts(self) -> None:
        """Write the counts to the spill files, and empty the table."""
        counts: Counter[str] = Counter()
        for piece, count in self._pieces.items():
            for word in self._splitter.split_into_words(piece):
                counts[word] += count
        self._pieces.clear()
        self._long = 0
        _spill_counts(counts, self._folder, self._number, 0)


def _spill_counts(counts: Counter[str], folder: Path, number: int, level: int) -> None:
    """Append counts to JSON-lines files in `folder`, a subfolder for each value of bits number `level` of the hash."""
    parts: list[dict[str, int]] = [{} for _ in range(1 << _SPILL_FILE_BITS)]
    for word, count in counts.items():
        parts[crc32(word.encode()) >> level * _SPILL_FILE_BITS & (1 << _SPILL_FILE_BITS) - 1][word] = count
    for index, part in enumerate(parts):
        if part:
            place = folder / f"{index}"
            place.mkdir(exist_ok=True)
            with (place / f"{number}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(part, ensure_ascii=False) + "\n")


def _merge_spilled(folder: Path, level: int = 1) -> Iterator[Counter[str]]:
    """Yield the total counts of all words spilled to a folder, each word once, and delete the spill files."""
    for place in sorted(folder.iterdir()):
        files = sorted(place.iterdir())
        divided = sum(file.stat().st_size for file in files) > _MAX_FILE_BYTES and level * _SPILL_FILE_BITS < 32
        counts: Counter[str] = Counter()
        for path in files:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    counts.update(json.loads(line))
                    if divided:
                        _spill_counts(counts, place, 0, level)
                        counts.clear()
            path.unlink()
        yield from _merge_spilled(place, level + 1) if divided else [counts]
        place.rmdir()


def _most_frequent(parts: Iterable[Counter[str]], limit: int) -> WordCounts:
    """Return the most frequent words that fit into `limit` bytes. `parts`: counts of all words, each word once."""
    kept: list[tuple[int, str]] = []
    occurrences = size = least = 0
    for counts in parts:
        occurrences += counts.total()
        for word, count in counts.items():
            if count >= least:
                kept.append((-count, word))
                size += len(word.encode()) + 1
        if size > 2 * limit:
            kept, size = _cut_to_bytes(kept, limit)
            least = -kept[-1][0] if kept else 0
    kept, _ = _cut_to_bytes(kept, limit)
    kept.sort(key=lambda entry: entry[1])
    totals = np.fromiter((-count for count, _ in kept), np.int64, len(kept))
    words = [word for _, word in kept]
    return WordCounts(words, totals, occurrences, occurrences - int(totals.sum()))


def _cut_to_bytes(entries: list[tuple[int, str]], limit: int) -> tuple[list[tuple[int, str]], int]:
    """Sort (-count, word) entries; return the first whose words fit into `limit` bytes, and the size of these words."""
    entries.sort()
    sizes = np.fromiter((len(word.encode()) + 1 for _, word in entries), np.int64, len(entries)).cumsum()
    kept = int(np.searchsorted(sizes, limit, side="right"))
    return entries[:kept], int(sizes[kept - 1]) if kept else 0


def _count_in_processes(texts: Iterable[str], splitter: Callable[[], WordSplitter], folder: Path, workers: int) -> None:
    """Count texts in several processes, which get batches in turn, and spill the counts to `folder`."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(_counting_process(splitter, folder, number)) for number in range(workers)]
        for pipe, batch in zip(cycle(pipes), _batches(texts), strict=False):
            if pipe.poll():
                break  # the process failed
            with suppress(ConnectionError):
                pipe.send(batch)
        for pipe in pipes:
            with suppress(ConnectionError):
                pipe.send(None)
        for pipe in pipes:
            _wait_for_process(pipe)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _wait_for_process(pipe: Connection) -> None:
    try:
        failure = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise TokenizerError(
            "a process that counted words died",
            remedy="run the command again; if memory ran out, use a machine with more memory",
        ) from error
    if failure is not None:
        raise failure


@contextmanager
def _counting_process(splitter: Callable[[], WordSplitter], folder: Path, number: int) -> Iterator[Connection]:
    """Yield a pipe to a process that counts the texts sent to it. After None is sent, it replies None or an error."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_counts, args=(there, splitter, folder, number), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def _serve_counts(pipe: Connection, splitter: Callable[[], WordSplitter], folder: Path, number: int) -> None:
    """Run a counting process: count the texts that come through `pipe` until None comes, and write the counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must not end this process before its parent
    table = _SpillingCounter(splitter(), folder, number)
    try:
        while (texts := pipe.recv()) is not None:
            for text in texts:
                table.count_text(text)
        table.write_counts()
        pipe.send(None)
    except EOFError:  # the parent process has ended
        return
    except OSError as error:
        pipe.send(error)
