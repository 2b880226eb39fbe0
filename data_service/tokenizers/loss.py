"""Measures, in characters, what a tokenizer loses of a text, so that a corpus of unknown tokens is found before a model
is trained on it.

unknown: characters that lie in unknown tokens. They are counted token by token.
marks, width, joiners, white_space, other, case: characters that reach the vocabulary as others, or not at all. What
becomes of a character is found by encoding it between two letters, once for each tokenizer; then characters are
counted. White space that follows other white space is counted apart, since many tokenizers keep one space of a run.
bytes: characters that are spelt byte by byte. They are not lost, but cost several tokens each.

Forms of a character that Unicode calls canonically equivalent (`é` as one code point or two) are the same here.
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
"""Kinds that never are a reason to refuse or warn: an uncased tokenizer was chosen as such, and bytes are not lost."""

WARNED_LOSS_SHARE, REFUSED_LOSS_SHARE = 0.01, 0.2
SHOWN_EXAMPLES = 5
_MAX_KEPT_EXAMPLES = 64  # examples of each kind in a record: merged records still know the most frequent
# Distinct unknown texts that are counted in one piece of work; later ones are not.
_MAX_COUNTED_EXAMPLES = 4096
_EXAMPLE_CHARACTERS = 24
_MAX_CACHED_WORD_CHARACTERS = 64  # characters of the longest word whose loss is cached, as lost words occur again


class TextLoss(BaseModel):
    """What a tokenizer loses of a text.

    Attributes:
        characters: number of characters of the text.
        lost: number of them that are lost, by kind; a character may count in several kinds. Kinds of none are left out.
        examples: the most frequent lost texts of each kind, and how often each occurs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    characters: NonNegativeInt = 0
    lost: dict[LossKind, NonNegativeInt] = {}
    examples: dict[LossKind, dict[str, NonNegativeInt]] = {}

    def share(self, kind: LossKind) -> float:
        """Return the share of the characters that are lost in this way."""
        return self.lost.get(kind, 0) / max(1, self.characters)

    def kinds_above(self, share: float) -> tuple[LossKind, ...]:
        """Return the kinds of loss, harmless ones left out, of which there is more than this share."""
        return tuple(kind for kind in KINDS if kind not in HARMLESS_KINDS and self.share(kind) > share)

    def top_examples(self, kind: LossKind) -> tuple[str, ...]:
        """Return the most frequent examples of a kind."""
        return tuple(_most_frequent(self.examples.get(kind, {}), SHOWN_EXAMPLES))

    @classmethod
    def sum_of(cls, parts: Iterable[Self]) -> Self:
        """Return the loss of several texts together."""
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
    """Raise TokenizerError if more than `REFUSED_LOSS_SHARE` of a text is lost in a way that the user has not accepted.

    `what`: the tokenizer and the text, for the message. `remedy`: what the user can do besides accepting the loss.
    """
    refused = [kind for kind in loss.kinds_above(REFUSED_LOSS_SHARE) if kind not in set(accepted_kinds)]
    if refused:
        named = "; ".join(describe_loss(loss, kind) for kind in refused)
        accept = " ".join(f"--accept-loss {kind}" for kind in refused)
        raise TokenizerError(f"{what}: {named}", remedy=f"{remedy}; to go on in spite of it, add {accept}")


_KIND_TEXTS: Mapping[LossKind, str] = {
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
    """Return one kind of loss in words: its share, and the most frequent examples."""
    examples = ", ".join(map(repr, loss.top_examples(kind)))
    return f"{loss.share(kind):.2%} of the characters {_KIND_TEXTS[kind]} ({examples})"


class LossMeter:
    """A counter of what `tokenizer` loses of the texts that are given to it.

    Attributes:
        cuts: number of cuts of long texts that may have changed tokens; counted by the caller.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.cuts = 0
        self._tokenizer = tokenizer
        # Counts of each code point, and of each one that is white space behind white space.
        self._codes, self._behind = np.zeros((2, CODE_POINT_COUNT), dtype=np.int64)
        self._lost = Counter[LossKind]()
        self._texts: dict[LossKind, Counter[str]] = {"unknown": Counter(), "bytes": Counter()}

    def measure_texts(self, texts: Sequence[str], placed: Sequence["PlacedTokens"]) -> None:
        """Count the characters of texts, and those of their tokens that are unknown or single bytes."""
        for text, tokens in zip(texts, placed, strict=True):
            self._add_tokens(text, tokens)
            codes, space = code_points(text), is_white_space(text)
            for counts, found in (
                (self._codes, codes),
                (self._behind, codes[1:][space[1:] & space[:-1]]),
            ):
                more = np.bincount(found)
                counts[: len(more)] += more

    def _add_tokens(self, text: str, tokens: "PlacedTokens") -> None:
        if not tokens.by_word:
            self._count_lost_texts(*_lost_texts(self._tokenizer, text, tokens))
            return
        byte = _byte_piece_mask(self._tokenizer)
        lossy = tokens.ids == self._tokenizer.special.unk
        lossy = lossy | byte[tokens.ids] if byte is not None and byte.any() else lossy
        places = sorted(set(zip(tokens.starts[lossy].tolist(), tokens.ends[lossy].tolist(), strict=True)))
        neighbours = "".join(text[start - 1 : start] + text[stop : stop + 1] for start, stop in places)
        # Each word keeps the space before it, because a mark at the word's beginning may be joined to that space.
        words = [text[start - text[start - 1 : start].isspace() : stop] for start, stop in places]
        if any(unicodedata.category(mark)[0] in "CM" and not mark.isspace() for mark in neighbours):
            words = [text]  # marks on both sides of a joiner that separates words make one cluster
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
        """Return the loss of all texts."""
        lost, examples = Counter(self._lost), {kind: Counter(found) for kind, found in self._texts.items()}
        for code in self._codes.nonzero()[0].tolist():
            behind = int(self._behind[code])
            for effect, count in (
                (_effect(self._tokenizer, chr(code), False), int(self._codes[code]) - behind),
                (_effect(self._tokenizer, chr(code), True), behind),
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
    """Return (first character, the one behind the last) of the text that is spelt byte by byte."""
    if byte is None:  # a byte-level token that begins inside a character
        starts = np.unique(tokens.starts[1:][tokens.starts[1:] < tokens.ends[:-1]])
        return zip(starts.tolist(), (starts + 1).tolist(), strict=True)
    # Unigram gives all bytes of neighbouring characters the place of the first to the last.
    starts, first = np.unique(tokens.starts[chosen := byte[tokens.ids]], return_index=True)
    return zip(starts.tolist(), tokens.ends[chosen][first].tolist(), strict=True)


@lru_cache(maxsize=1 << 22)  # every character, in both places
def _effect(tokenizer: "Tokenizer", character: str, behind_space: bool) -> LossKind | None:
    """Return what becomes of a character; None if it is kept."""
    if character.isspace():
        return _space_effect(tokenizer, " " * behind_space + character)
    return _character_effect(tokenizer, character)


def _space_effect(tokenizer: "Tokenizer", spaces: str) -> LossKind | None:
    """Return "white_space" if text with these characters has the tokens of text with one space in their place."""
    whole, plain = tokenizer.encode_batch([f"a{spaces}b", "a b"])
    return "white_space" if spaces != " " and np.array_equal(whole, plain) else None


def _character_effect(tokenizer: "Tokenizer", character: str) -> LossKind | None:
    """Return how a character that is no white space is lost; None if it is kept, or is unknown to the vocabulary."""
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
    """Return the text without white space, in the form in which canonically equivalent texts are equal."""
    return "".join(unicodedata.normalize("NFD", text).replace(SPACE_MARK, " ").split())


def _without_marks(text: str) -> str:
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


def _has_own_token(tokenizer: "Tokenizer", character: str) -> bool:
    """Return whether a token stands for a character between two letters, or for the letter that it makes with the one
    before it, whose place that token has.
    """
    text = f"a{character}a"
    tokens = tokenizer.encode_placed([text])[0]
    place = 1 if unicodedata.is_normalized("NFC", text) else 0
    return bool(((tokens.starts <= place) & (place < tokens.ends)).any())


@lru_cache(maxsize=4)
def _byte_piece_mask(tokenizer: "Tokenizer") -> NDArray[np.bool_] | None:
    """Return [vocab_size] bool, the pieces that stand for one byte; None for byte-level BPE, whose every piece does so
    for several.
    """
    if tokenizer.kind == "byte_bpe":
        return None
    return np.array([len(piece) == 6 and piece.startswith("<0x") for piece in tokenizer.pieces])


def _most_frequent(counts: Mapping[str, int], number: int) -> dict[str, int]:
    """Return the most frequent texts, in order; equally frequent ones in the order of their characters."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number])
