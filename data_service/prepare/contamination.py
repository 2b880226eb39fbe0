"""Finds documents that share a run of 13 consecutive units (about words, see `shingles.py`) with an evaluation text.

`maskfleet tasks ngrams` makes an index of the texts of the dev and test splits; the stage's settings name the file and
its hash. The file holds the sorted hashes of runs, so a document is looked up by binary search. A text of 8 to 12 units
is a single run; shorter texts are left out, because they occur by chance. Runs in more than `MAX_TEXTS_PER_RUN` texts
of one split are templates and are left out. A text that has only such runs cannot be found. The index records how many
texts of each split can be found. Source: Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from data_service.corpus.origin import IndexedSplit
from data_service.errors import PrepareError
from data_service.formats import StrictRecord
from data_service.prepare.documents import CutDecision, Document, DropDecision
from data_service.prepare.model_file import check_file_hash
from data_service.prepare.shingles import hash_runs, hash_units, hash_units_by_line

RUN_WORDS, MIN_TEXT_WORDS, MAX_TEXTS_PER_RUN = 13, 8, 10  # see the docstring of this file
_INDEX_REMEDY = "make it with `maskfleet tasks ngrams`"
_MAX_LISTED_TEXTS = 3  # evaluation texts named in the detail of a dropped document
_INDEX_TITLE = np.frombuffer(b"maskfleet ngrams 2", dtype=np.uint8)  # format and version of an index file


@dataclass(frozen=True)
class EvaluationText:
    """A text of an evaluation set. `split`: task and split, such as `sst2/dev`; `number`: index of the example."""

    split: str
    number: int
    text: str


@dataclass(frozen=True)
class NgramIndex:
    """The index of all runs of units in evaluation texts.

    Attributes:
        splits: the indexed splits.
        spans: [K] the different lengths of the runs, in units, ascending.
        keys: [N] uint64 hashes of runs, ascending, without repetitions.
        texts: [N] int64, the first text with the run: the split's number times 2**32 plus the example's number.
    """

    splits: tuple[IndexedSplit, ...]
    spans: NDArray[np.int64]
    keys: NDArray[np.uint64]
    texts: NDArray[np.int64]

    def find_matching_texts(self, text: str) -> list[tuple[str, int]]:
        """Return (split, example) of the evaluation texts that share a run with `text`, each once, in order."""
        found = set[int]()
        for _, matched in self._match_runs(hash_units(text)):
            found.update(self.texts[matched[matched >= 0]].tolist())
        return [(self.splits[one >> 32].split, one & 0xFFFFFFFF) for one in sorted(found)]

    def mark_covered_units(self, units: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return [U]: whether each unit belongs to a run that is in the index."""
        covered = np.zeros(len(units), dtype=np.bool_)
        for span, matched in self._match_runs(units):
            for start in np.flatnonzero(matched >= 0).tolist():
                covered[start : start + span] = True
        return covered

    def _match_runs(self, units: NDArray[np.uint64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield (span, indices) for each span: `indices` gives each run's index in `keys`, -1 if it is not there."""
        for span in self.spans.tolist():
            wanted = hash_runs(units, span)
            places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
            yield span, np.where(self.keys[places] == wanted, places, -1)


_KeyedTexts = tuple[NDArray[np.uint64], NDArray[np.int64]]  # `keys` and `texts` of one split, as in NgramIndex


def build_index(texts: Iterable[EvaluationText]) -> NgramIndex:
    """Return the index of the texts. The index numbers the splits in the order of their first texts.

    Memory: 32 bytes for each run. Raises PrepareError: no text is long enough.
    """
    by_split: dict[str, list[EvaluationText]] = {}
    for text in texts:
        by_split.setdefault(text.split, []).append(text)
    splits, parts, spans = list[IndexedSplit](), list[_KeyedTexts](), set[int]()
    for number, (split, its) in enumerate(by_split.items()):
        described, part, used = _index_split(number, split, its)
        splits.append(described)
        parts.append(part)
        spans |= used
    if not sum(split.looked_up for split in splits):
        raise PrepareError(
            f"no text of {', '.join(by_split) or 'any split'} has {MIN_TEXT_WORDS} words, so there is nothing to index",
            remedy="give other tasks or files",
        )
    keys, texts_of = (np.concatenate(column) for column in zip(*parts, strict=True))
    # `unique` keeps the first of equal runs, so that a run belongs to the first split that has it.
    keys, first = np.unique(keys, return_index=True)
    return NgramIndex(tuple(splits), np.array(sorted(spans), dtype=np.int64), keys, texts_of[first])


def _index_split(
    number: int, split: str, texts: Sequence[EvaluationText]
) -> tuple[IndexedSplit, _KeyedTexts, set[int]]:
    """Return the description of a split, its arrays `keys` and `texts`, and the different lengths of its runs."""
    # The dict keeps the last value of a key: in reversed order that is the number of the first of equal texts.
    different = {text.text: text.number for text in reversed(texts)}
    keys, owners, spans = list[NDArray[np.uint64]](), list[NDArray[np.int64]](), set[int]()
    for place, text in enumerate(different):
        units = hash_units(text)
        if len(units) >= MIN_TEXT_WORDS:
            span = min(RUN_WORDS, len(units))
            spans.add(span)
            keys.append(np.unique(hash_runs(units, span)))
            owners.append(np.full(len(keys[-1]), place))
    every = np.concatenate(keys) if keys else np.empty(0, dtype=np.uint64)
    owner = np.concatenate(owners) if owners else np.empty(0, dtype=np.int64)
    _, inverse, counts = np.unique(every, return_inverse=True, return_counts=True)
    rare = counts[inverse] <= MAX_TEXTS_PER_RUN
    every, owner = every[rare], owner[rare]
    examples = np.array(list(different.values()), dtype=np.int64)
    described = IndexedSplit(
        split=split, texts=len(different), looked_up=len(np.unique(owner)), digest=hash_text_set(different)
    )
    order = np.argsort(examples[owner], kind="stable")
    return described, (every[order], (number << 32) + examples[owner][order]), spans


def hash_text_set(texts: Iterable[str]) -> str:
    """Return the BLAKE2b hash (16 bytes, hex) of a split's distinct texts; it does not depend on their order."""
    digest = blake2b(digest_size=16)
    for text in sorted(set(texts)):
        digest.update(len(text).to_bytes(8) + text.encode(errors="surrogatepass"))
    return digest.hexdigest()


def dump_index(index: NgramIndex) -> bytes:
    """Return an index as bytes of an .npz file. Equal indexes give equal bytes."""
    splits_json = json.dumps([split.model_dump() for split in index.splits]).encode()
    file = io.BytesIO()
    np.savez(
        file,
        title=_INDEX_TITLE,
        splits=np.frombuffer(splits_json, dtype=np.uint8),
        spans=index.spans.astype("<i8"),
        keys=index.keys.astype("<u8"),
        texts=index.texts.astype("<i8"),
    )
    return file.getvalue()


def load_index(path: str) -> NgramIndex:
    """Return the index in a file. Raises PrepareError: the file cannot be read, or is not an index."""
    try:
        with np.load(Path(path), allow_pickle=False) as stored:
            found = {name: stored[name] for name in ("title", "splits", "spans", "keys", "texts")}
        splits = TypeAdapter(tuple[IndexedSplit, ...]).validate_json(found["splits"].tobytes())
    except OSError as error:
        raise PrepareError(f"{path} cannot be read: {error}", remedy=_INDEX_REMEDY) from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, ValidationError) as error:
        raise _no_index_error(path) from error
    keys, texts = found["keys"], found["texts"]
    if not np.array_equal(found["title"], _INDEX_TITLE) or not len(keys) or len(keys) != len(texts):
        raise _no_index_error(path)
    return NgramIndex(splits, found["spans"], keys, texts)


def _no_index_error(path: str) -> PrepareError:
    return PrepareError(f"{path} is not an index of evaluation texts", remedy=_INDEX_REMEDY)


class Decontaminate(StrictRecord):
    """Drops documents that contain a run of words of an evaluation text, or cuts the lines that contain it.

    Attributes:
        index: path of the index file, the same on all workers.
        sha256: hash of the file, in hexadecimal.
        found: action on documents with such a run: `drop` them, or `cut` every line with a part of a run.
    """

    stage: Literal["decontaminate"]
    index: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    found: Literal["drop", "cut"] = "drop"


def make_decontamination_filter(
    stage: Decontaminate,
) -> Callable[[Document], Document | DropDecision | CutDecision]:
    """Return the function that applies the stage to a document. A drop's reason is the first matching split.

    Raises:
        PrepareError: the file is missing, has another hash, or is not an index.
    """
    check_file_hash(stage.index, stage.sha256, "index of evaluation texts")
    index = _load_index_cached(stage.index, stage.sha256)

    def filter_document(document: Document) -> Document | DropDecision | CutDecision:
        found = index.find_matching_texts(document.text)
        if not found:
            return document
        if stage.found == "cut" and (rest := _remove_matching_lines(document.text, index)):
            return CutDecision(replace(document, text=rest), found[0][0])
        named = ", ".join(f"{split} {number}" for split, number in found[:_MAX_LISTED_TEXTS])
        more = f" and {len(found) - _MAX_LISTED_TEXTS} more" if len(found) > _MAX_LISTED_TEXTS else ""
        return DropDecision(found[0][0], f"examples {named}{more}")

    return filter_document


def _remove_matching_lines(text: str, index: NgramIndex) -> str:
    """Return the text without the lines that contain a part of a run found in the index.

    Return "" if nothing remains, or if the remaining lines, now adjacent, form another run of the index.
    """
    lines, units, line_of = hash_units_by_line(text)
    gone = set(line_of[index.mark_covered_units(units)].tolist())
    rest = "\n".join(line for number, line in enumerate(lines) if number not in gone)
    return "" if not gone or not rest.strip() or index.find_matching_texts(rest) else rest


def indexed_splits(stages: Iterable[object]) -> list[IndexedSplit]:
    """Return the distinct splits in the indexes of all `decontaminate` stages.

    Raises PrepareError: as `load_index`.
    """
    indexes = (_load_index_cached(stage.index, stage.sha256) for stage in stages if isinstance(stage, Decontaminate))
    return list(dict.fromkeys(split for index in indexes for split in index.splits))


@lru_cache(maxsize=4)
def _load_index_cached(path: str, sha256: str) -> NgramIndex:
    return load_index(path)
