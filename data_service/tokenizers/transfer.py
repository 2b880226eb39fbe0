"""From one vocabulary to another: which old pieces each new piece comes from, so that rows of embeddings
can be reused.
"""

from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders

from data_service.errors import TokenizerError
from data_service.tokenizers.files import DEFINITION
from data_service.tokenizers.tokenizer import Tokenizer

_CONTINUES = "##"
_BYTE_LEVEL = decoders.ByteLevel()


@dataclass(frozen=True)
class Origins:
    """The old ids that each of V new ids comes from: one for a piece that both know, several for a new one.

    Attributes:
        offsets: [V + 1] int64; new id i comes from ids[offsets[i] : offsets[i + 1]], from none if it is unused.
        ids: int64, old ids.
        copied: new ids that are the same piece, or play the same special role, in both.
        averaged: new ids made of the pieces that the old tokenizer splits them into.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    copied: int
    averaged: int


def origins(old: Tokenizer, new: Tokenizer) -> Origins:
    """Where each piece of `new` comes from in `old`.

    Raises TokenizerError: the two write words in different ways, or share no piece.
    """
    if _writing(old) != _writing(new):
        raise _unrelated(f"a {old.kind} and a {new.kind} tokenizer write words in different ways")
    same = _same(old, new)
    if not same.keys() - _special_ids(new):
        raise _unrelated("the two tokenizers have no piece in common")
    split = _Splitter(old)
    sources = [[same[i]] if i in same else split(piece) for i, piece in enumerate(new.pieces)]
    lengths = np.array([len(ids) for ids in sources], dtype=np.int64)
    return Origins(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=np.array([i for ids in sources for i in ids], dtype=np.int64),
        copied=len(same),
        averaged=int(np.count_nonzero(lengths)) - len(same),
    )


def _writing(tokenizer: Tokenizer) -> str:
    return "sentencepiece" if tokenizer.kind in ("unigram", "bpe") else tokenizer.kind


def _unrelated(problem: str) -> TokenizerError:
    return TokenizerError(
        problem,
        remedy="use the model's own tokenizer, or extend it (maskfleet tokenizer extend); for another one start from "
        "scratch",
    )


def _same(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    """New id to old id, by special role first, then by piece."""
    known = {piece: i for i, piece in enumerate(old.pieces) if piece}
    same = {i: known[piece] for i, piece in enumerate(new.pieces) if piece in known}
    return same | {getattr(new.special, role): getattr(old.special, role) for role in new.names.by_role()}


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {int(i) for i in tokenizer.special_mask.nonzero()[0]}


class _Splitter:
    """Splits a piece of another vocabulary, which writes words in the same way, into ids of this one; none for an
    unused id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizers.Tokenizer.from_str(tokenizer.save_files()[DEFINITION].decode()).model
        self._ids = {piece: i for i, piece in enumerate(tokenizer.pieces)}

    def __call__(self, piece: str) -> list[int]:
        if not piece:
            return []
        return self._split(piece) or [self._tokenizer.special.unk]

    def _split(self, piece: str) -> list[int]:
        match self._tokenizer.kind:
            case "unigram" | "bpe":
                return self._whole(piece)
            case "byte_bpe":
                text = _BYTE_LEVEL.decode([piece])
                # Part of a character is no text: its bytes are split as they stand.
                return self._whole(piece) if "\ufffd" in text else self._tokenizer.encode(text).tolist()
            case "wordpiece":
                continues = piece.startswith(_CONTINUES)
                return self._continued(piece) if continues else self._tokenizer.encode(piece).tolist()

    def _whole(self, piece: str) -> list[int]:
        """By the model alone: the piece is in the form that text has when it reaches the model."""
        return [token.id for token in self._model.tokenize(piece)]

    def _continued(self, piece: str) -> list[int]:
        """The rest of a word, the longest known piece each time, as WordPiece does; nothing if one is lacking."""
        rest, found = piece.removeprefix(_CONTINUES), list[int]()
        while rest:
            known = (n for n in range(len(rest), 0, -1) if _CONTINUES + rest[:n] in self._ids)
            length = next(known, 0)
            if not length:
                return []
            found.append(self._ids[_CONTINUES + rest[:length]])
            rest = rest[length:]
        return found
