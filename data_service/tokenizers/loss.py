"""Counts the characters of a text that a tokenizer loses, so that a corpus full of unknown tokens is noticed before a
model is trained on it.

unknown: characters inside unknown tokens, counted token by token.
marks, width, joiners, white_space, other, case: characters that normalization changes or drops. The kind of a character
is found by encoding it between two letters, once per tokenizer; then its occurrences are counted. White space after
other white space is counted separately, since many tokenizers keep one space of a run.
bytes: characters that are spelt byte by byte. They are not lost, but cost several tokens each.

Canonically equivalent forms of a character (`é` as one code point or two) count as equal.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from data_service.characters import CODE_POINT_COUNT, code_points, is_white_space
from data_service.errors import TokenizerError
from data_service.tokenizers.words import SPACE_MARK

if TYPE_CHECKING:
    from data_service.tokenizers.tokenizer import PlacedTokens, Tokenizer

LossKind = Literal["unknown", "marks", "width", "joiners", "white_space", "other", "case", "bytes"]
KINDS: tuple[LossKind, ...] = get_args(LossKind)
HARMLESS_KINDS: frozenset[LossKind] = frozenset({"case", "bytes"})
"""Kinds that never cause an error or warning: lost case is intended, and byte-by-byte spelling loses nothing."""

# If more than these shares of a text's characters are lost in one kind: a warning; an error.
WARNED_LOSS_SHARE, REFUSED_LOSS_SHARE = 0.01, 0.2
SHOWN_EXAMPLES = 5  # examples per kind that messages and reports show
_MAX_KEPT_EXAMPLES = 64  # examples of each kind that a `TextLoss` stores
# Largest number of distinct lost texts that a `LossMeter` counts as examples; later ones are ignored.
_MAX_COUNTED_EXAMPLES = 4096
_EXAMPLE_CHARACTERS = 24  # an example is cut to this length
_MAX_CACHED_WORD_CHARACTERS = 64  # the lost texts of words up to this length are cached


class TextLoss(BaseModel):
    """The numbers of characters of a text that a tokenizer loses, by kind.

    Attributes:
        characters: number of characters of the text.
        lost: number of lost characters by kind, without zeros; a character may count in several kinds.
        examples: number of occurrences of the most frequent lost texts of each kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    characters: NonNegativeInt = 0
    lost: dict[LossKind, NonNegativeInt] = {}
    examples: dict[LossKind, dict[str, NonNegativeInt]] = {}

    def share(self, kind: LossKind) -> float:
        """Return the share of the text's characters that are lost in this way."""
        return self.lost.get(kind, 0) / max(1, self.characters)

    def kinds_above(self, share: float) -> tuple[LossKind, ...]:
        """Return the kinds, except `HARMLESS_KINDS`, in which more than this share of the characters is lost."""
        return tuple(kind for kind in KINDS if kind not in HARMLESS_KINDS and self.share(kind) > share)

    def top_examples(self, kind: LossKind) -> tuple[str, ...]:
        """Return the most frequent lost texts of a kind."""
        return tuple(_most_frequent(self.examples.get(kind, {}), SHOWN_EXAMPLES))

    @classmethod
    def sum_of(cls, parts: Iterable[Self]) -> Self:
        """Return the loss of several texts together; `parts`: the loss of each."""
        characters, lost = 0, Counter[LossKind]()
        examples: dict[LossKind, Counter[str]] = {}
        for part in parts:
            characters += part.characters
            lost.update(part.lost)
            for kind, found in part.examples.items():
                examples.setdefault(kind, Counter()).update(found)
        kept = {kind: _most_frequent(examples[kind], _MAX_KEPT_EXAMPLES) for kind in KINDS if kind in examples}
        return cls(characters=characters, lost={k: lost[k] for k in KINDS if lost[k]}, examples=kept)


def check_text_loss(loss: TextLoss, accepted_kinds: Iterable[str], what: str, remedy: str) -> None:
    """Raise TokenizerError if a share above `REFUSED_LOSS_SHARE` is lost in a kind that is not in `accepted_kinds`.

    `what`: the tokenizer and the text, for the message. `remedy`: what the user can do besides accepting the loss.
    """
    refused = [kind for kind in loss.kinds_above(REFUSED_LOSS_SHARE) if kind not in set(accepted_kinds)]
    if refused:
        named = "; ".join(describe_loss(loss, kind) for kind in refused)
        accept = " ".join(f"--accept-loss {kind}" for kind in refused)
        raise TokenizerError(f"{what}: {named}", remedy=f"{remedy}; to accept the loss, add {accept}")


_KIND_PHRASES: Mapping[LossKind, str] = {
    "unknown": "are in unknown tokens",
    "marks": "lose accents, vowel signs or other marks",
    "width": "become compatible forms of themselves",
    "joiners": "are joiners that are lost",
    "white_space": "are white space that is lost",
    "other": "are lost or exchanged otherwise",
    "case": "lose their case",
    "bytes": "are spelt byte by byte, which loses nothing",
}


def describe_loss(loss: TextLoss, kind: LossKind) -> str:
    """Return a phrase for one kind of lost characters: their share of the text, and the most frequent examples."""
    examples = ", ".join(map(repr, loss.top_examples(kind)))
    return f"{loss.share(kind):.2%} of the characters {_KIND_PHRASES[kind]} ({examples})"


class LossMeter:
    """A counter of the characters that `tokenizer` loses in the texts given to `measure_texts`.

    Attributes:
        cuts: number of cuts in long texts that may have changed tokens; the caller adds them up.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.cuts = 0
        self._tokenizer = tokenizer
        # Occurrences of each code point, and of each white-space code point that follows other white space.
        self._codes, self._after_space = np.zeros((2, CODE_POINT_COUNT), dtype=np.int64)
        self._lost = Counter[LossKind]()
        self._texts: dict[LossKind, Counter[str]] = {"unknown": Counter(), "bytes": Counter()}

    def measure_texts(self, texts: Sequence[str], placed: Sequence["PlacedTokens"]) -> None:
        """Add texts, given with their tokens, to the counts of characters, unknown text and byte-by-byte spelling."""
        for text, tokens in zip(texts, placed, strict=True):
            self._add_tokens(text, tokens)
            codes, space = code_points(text), is_white_space(text)
            for counts, found in (
                (self._codes, codes),
                (self._after_space, codes[1:][space[1:] & space[:-1]]),
            ):
                more = np.bincount(found)
                counts[: len(more)] += more

    def _add_tokens(self, text: str, tokens: "PlacedTokens") -> None:
        """Count the text of unknown tokens, and the characters that are spelt byte by byte."""
        if not tokens.by_word:
            self._count_lost_texts(*_lost_texts(self._tokenizer, text, tokens))
            return
        byte = _byte_piece_mask(self._tokenizer)
        lossy = tokens.ids == self._tokenizer.special.unk
        lossy = lossy | byte[tokens.ids] if byte is not None and byte.any() else lossy
        places = sorted(set(zip(tokens.starts[lossy].tolist(), tokens.ends[lossy].tolist(), strict=True)))
        neighbours = "".join(text[start - 1 : start] + text[stop : stop + 1] for start, stop in places)
        # Each word keeps the space before it, which a mark at the word's beginning may combine with.
        words = [text[start - text[start - 1 : start].isspace() : stop] for start, stop in places]
        if any(unicodedata.category(mark)[0] in "CM" and not mark.isspace() for mark in neighbours):
            words = [text]  # a mark or joiner next to a word may combine with it
        for word in words:
            lost = (
                _lost_in_single_text if len(word) <= _MAX_CACHED_WORD_CHARACTERS else _lost_in_single_text.__wrapped__
            )
            self._count_lost_texts(*lost(self._tokenizer, word))

    def _count_lost_texts(self, unknown: Sequence[str], spelt: Sequence[str]) -> None:
        found: tuple[tuple[LossKind, Sequence[str]], ...] = (("unknown", unknown), ("bytes", spelt))
        for kind, texts in found:
            self._lost[kind] += sum(map(len, texts))
            counter = self._texts[kind]
            for text in texts:
                example = text[:_EXAMPLE_CHARACTERS]
                if example in counter or len(counter) < _MAX_COUNTED_EXAMPLES:
                    counter[example] += 1

    def total(self) -> TextLoss:
        """Return the lost characters of all texts so far."""
        lost, examples = Counter(self._lost), {kind: Counter(found) for kind, found in self._texts.items()}
        for code in self._codes.nonzero()[0].tolist():
            behind = int(self._after_space[code])
            for effect, count in (
                (_loss_kind(self._tokenizer, chr(code), False), int(self._codes[code]) - behind),
                (_loss_kind(self._tokenizer, chr(code), True), behind),
            ):
                if effect is not None and count:
                    lost[effect] += count
                    examples.setdefault(effect, Counter())[chr(code)] += count
        found = TextLoss(
            characters=int(self._codes.sum()),
            lost=dict(lost),
            examples={kind: dict(counter) for kind, counter in examples.items() if counter},
        )
        return TextLoss.sum_of([found])


@lru_cache(maxsize=1 << 14)
def _lost_in_single_text(tokenizer: "Tokenizer", text: str) -> tuple[Sequence[str], Sequence[str]]:
    return _lost_texts(tokenizer, text, tokenizer.encode_placed([text])[0])


def _lost_texts(tokenizer: "Tokenizer", text: str, tokens: "PlacedTokens") -> tuple[Sequence[str], Sequence[str]]:
    """Return the texts of unknown tokens, and the characters that are spelt byte by byte."""
    unknown = tokens.ids == tokenizer.special.unk
    spans = zip(tokens.starts[unknown].tolist(), tokens.ends[unknown].tolist(), strict=True)
    spelt = "".join(text[start:stop] for start, stop in _byte_spelt_ranges(_byte_piece_mask(tokenizer), tokens))
    return [text[start:stop] for start, stop in spans], list(spelt)


def _byte_spelt_ranges(byte: NDArray[np.bool_] | None, tokens: "PlacedTokens") -> Iterable[tuple[int, int]]:
    """Return the character ranges (start, stop) that are spelt byte by byte. `byte`: as from `_byte_piece_mask`."""
    if byte is None:  # byte-level BPE: characters that several tokens share
        starts = np.unique(tokens.starts[1:][tokens.starts[1:] < tokens.ends[:-1]])
        return zip(starts.tolist(), (starts + 1).tolist(), strict=True)
    # For unigram, the byte tokens of neighbouring characters all have the range of the whole run.
    starts, first = np.unique(tokens.starts[chosen := byte[tokens.ids]], return_index=True)
    return zip(starts.tolist(), tokens.ends[chosen][first].tolist(), strict=True)


@lru_cache(maxsize=1 << 22)  # room for every character, with and without white space before it
def _loss_kind(tokenizer: "Tokenizer", character: str, behind_space: bool) -> LossKind | None:
    """Return the kind in which a character is lost; None if kept. `behind_space`: whether it follows white space."""
    if character.isspace():
        return _space_loss_kind(tokenizer, " " * behind_space + character)
    return _character_loss_kind(tokenizer, character)


def _space_loss_kind(tokenizer: "Tokenizer", spaces: str) -> LossKind | None:
    """Return "white_space" if these characters are encoded like a single space, but are not one; else None."""
    whole, plain = tokenizer.encode_batch([f"a{spaces}b", "a b"])
    return "white_space" if spaces != " " and np.array_equal(whole, plain) else None


def _character_loss_kind(tokenizer: "Tokenizer", character: str) -> LossKind | None:
    """Return the kind in which a character (not white space) is lost; None if kept, or unknown to the vocabulary."""
    text = f"a{character}a"
    given, lowered, normal = map(_normalize_without_spaces, (text, text.lower(), tokenizer.normalize(text)))
    if given == normal:
        return None if _has_own_token(tokenizer, character) else "other"
    if normal == lowered:
        return "case"
    if normal in (_without_marks(given), _without_marks(lowered)):
        return "marks"
    if unicodedata.category(character) == "Cf":
        return "joiners"
    wide = unicodedata.normalize("NFKC", text)
    forms = [_normalize_without_spaces(wide), _normalize_without_spaces(wide.lower())]
    return "width" if normal in (*forms, *map(_without_marks, forms)) else "other"


def _normalize_without_spaces(text: str) -> str:
    """Return the text in Unicode form NFD, without white space."""
    return "".join(unicodedata.normalize("NFD", text).replace(SPACE_MARK, " ").split())


def _without_marks(text: str) -> str:
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


def _has_own_token(tokenizer: "Tokenizer", character: str) -> bool:
    """Return whether some token covers a character that stands between two letters. If the character combines with the
    letter before it, the token must cover that letter."""
    text = f"a{character}a"
    tokens = tokenizer.encode_placed([text])[0]
    place = 1 if unicodedata.is_normalized("NFC", text) else 0
    return bool(((tokens.starts <= place) & (place < tokens.ends)).any())


@lru_cache(maxsize=4)
def _byte_piece_mask(tokenizer: "Tokenizer") -> NDArray[np.bool_] | None:
    """Return [vocab_size] bool: which pieces stand for one byte, such as "<0x0A>"; None for byte-level BPE, where every
    piece stands for bytes."""
    if tokenizer.kind == "byte_bpe":
        return None
    return np.array([len(piece) == 6 and piece.startswith("<0x") for piece in tokenizer.pieces])


def _most_frequent(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """Return the `number` most frequent texts with their counts, in order; equally frequent ones sorted as text."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number])
