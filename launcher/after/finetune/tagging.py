"""The task kind tagging: a label for each word, predicted at its first piece (Devlin et al. 2019, section 5.3)."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from launcher.after.finetune.inputs import (
    IGNORED,
    Head,
    InputRow,
    Logits,
    Pieces,
    Prepared,
    best_window,
    window_ranges,
)
from launcher.after.finetune.settings import Tags, TaskMismatch
from launcher.after.tasks.examples import Tagged


@dataclass(frozen=True)
class PreparedWords(Prepared):
    """Sentences as rows.

    Attributes:
        places: for each sentence, [words, 2]: the row and the position in it at which each word is predicted.
    """

    places: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True)
class TaggingKind:
    """The kind of task with a label for each word. A sentence that is too long for the model becomes several rows; each
    word has its label in one of them."""

    pieces: Pieces
    labels: tuple[str, ...]
    stride: int

    head: Head = "TokenClassification"

    @property
    def outputs(self) -> int:
        return len(self.labels)

    def prepare(self, examples: Tagged) -> PreparedWords:
        """Return the rows of all sentences. Raises TaskMismatch if a tag is none of the task's."""
        if any(not 0 <= tag < len(self.labels) for tags in examples.tags for tag in tags):
            raise TaskMismatch(
                f"tags of the examples are not among the task's: {', '.join(self.labels)}",
                remedy="list every tag in the task's `labels`",
            )
        rows: list[InputRow] = []
        places = []
        for words, tags in zip(examples.words, examples.tags, strict=True):
            more, place = self._sentence(words, np.array(tags, np.int64), len(rows))
            rows += more
            places.append(place)
        return PreparedWords(rows, tuple(places))

    def _sentence(
        self, words: Sequence[str], tags: NDArray[np.int64], before: int
    ) -> tuple[list[InputRow], NDArray[np.int64]]:
        whole, content, first = self._encode(words)
        ranges = window_ranges(len(content), self.pieces.max_length - len(whole) + len(content), self.stride)
        window = best_window(len(content), ranges)[first] if len(words) else np.zeros(0, np.int64)
        begins = np.array([begin for begin, _ in ranges])
        prefix = int(content[0]) if len(content) else 0
        position = prefix + first - begins[window]
        rows = []
        for index, (begin, end) in enumerate(ranges):
            kept = np.r_[:prefix, content[begin:end], prefix + len(content) : len(whole)]
            target = np.full(len(kept), IGNORED, np.int64)
            here = window == index
            target[position[here]] = tags[here]
            rows.append(InputRow(whole[kept, 0], whole[kept, 1] if self.pieces.types else None, target))
        return rows, np.stack([before + window, position], axis=1)

    def _encode(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return [T, 2] ids and types of all pieces; the indices of the text's pieces, which are consecutive; and for
        each word, which of these is its first piece.

        The words are joined by spaces, so that their pieces are those of running text. A word that the tokenizer drops
        (control characters) is replaced by the unknown piece.
        """
        whole, content, word_of = self._pieces(words)
        if len(np.setdiff1d(np.arange(len(words)), word_of)):
            # `tokenizers` misplaces pieces after a character that it drops, so such characters are removed first.
            words = [_printable(word) for word in words]
            whole, content, word_of = self._pieces(words)
        lost = np.setdiff1d(np.arange(len(words)), word_of)
        if len(lost):
            unknown = self.pieces.tokenizer.unk_token or self.pieces.tokenizer.mask_token
            words = [unknown if index in lost else word for index, word in enumerate(words)]
            whole, content, word_of = self._pieces(words)
        found, first = np.unique(word_of, return_index=True)
        if len(found) != len(words):
            raise TaskMismatch(
                f"the tokenizer leaves nothing of a word of: {' '.join(words)[:200]}",
                remedy="remove that word, or use a tokenizer with an unknown piece",
            )
        return whole, content, first.astype(np.int64)

    def _pieces(self, words: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        encoded = self.pieces.tokenizer(" ".join(words), return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], np.int64)
        types = np.array(encoded.get("token_type_ids") or np.zeros_like(ids), np.int64)
        offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        content = np.flatnonzero([part is not None for part in encoded.sequence_ids()])
        # A piece belongs to the first word that ends after the piece begins: a space's piece to the word behind it.
        ends = np.array(list(accumulate(len(word) + 1 for word in words)), np.int64) - 1
        word_of = np.searchsorted(ends, offsets[content, 0], side="right")
        return np.stack([ids, types], axis=1), content, word_of

    def targets(self, rows: Sequence[InputRow], width: int) -> Tensor:
        """Return the labels of rows: [rows, width] int64, IGNORED where no word begins."""
        values = np.full((len(rows), width), IGNORED, np.int64)
        for index, row in enumerate(rows):
            start = self.pieces.shift(row, width)
            values[index, start : start + len(row)] = row.target
        return torch.from_numpy(values)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def count(self, rows: Sequence[InputRow]) -> int:
        return sum(int((row.target != IGNORED).sum()) for row in rows)

    def predictions(self, prepared: PreparedWords, logits: Sequence[Logits]) -> Tags:
        """Return the most likely tag of each word. `logits`: logits of each row, [pieces, labels]."""
        return tuple(
            tuple(int(logits[row][position].argmax()) for row, position in place) for place in prepared.places
        )


def _printable(word: str) -> str:
    """Return a word without control characters, format characters and unassigned code points."""
    return "".join(character for character in word if not unicodedata.category(character).startswith("C"))
