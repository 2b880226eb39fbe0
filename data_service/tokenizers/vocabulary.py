"""Changes a model's vocabulary for continued pretraining: adds words to its tokenizer, or finds for a new tokenizer
which old embeddings initialise each piece.

When words are added, existing pieces keep their ids, and the new pieces follow. How a word becomes one piece depends on
the kind of tokenizer:

wordpiece: the longest piece at a word's start wins, so adding the word is enough. The new piece may also begin longer
words.
byte_bpe, bpe: a word in the vocabulary becomes one piece before any merge (`ignore_merges`), so all other words are
split as before. byte_bpe adds two pieces per word: with and without a leading space. With bpe a word includes the
punctuation after it, so "term," remains split.
unigram: the new piece scores just above the best split of its word. It may also begin longer words if that scores best.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models

from data_service.errors import TokenizerError
from data_service.tokenizers.files import DEFINITION_FILE, SENTENCEPIECE_FILES, Definition
from data_service.tokenizers.load import from_files
from data_service.tokenizers.spm import append_pieces, parse_model
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.words import CONTINUATION_PREFIX

_UNKNOWN_PENALTY = 10.0  # SentencePiece scores unknown characters this far below the lowest score
_SCORE_MARGIN = 1e-3  # a new piece scores this far above the best split of its word


@dataclass(frozen=True)
class ExtendedTokenizer:
    """A tokenizer with added pieces.

    Attributes:
        tokenizer: extended tokenizer. Its first ids are those of the old one.
        added: new pieces, in id order.
        known: terms that were a single piece already.
    """

    tokenizer: Tokenizer
    added: tuple[str, ...]
    known: tuple[str, ...]


def extend_tokenizer(tokenizer: Tokenizer, terms: Iterable[str]) -> ExtendedTokenizer:
    """Add pieces to `tokenizer` so that each term, a single word, becomes one token. Terms may be repeated or blank.

    Raises TokenizerError: there are no terms, a term is not a single word for the tokenizer, or cannot become one
    piece.
    """
    wanted = list(dict.fromkeys(term.strip() for term in terms if term.strip()))
    if not wanted:
        raise TokenizerError("no terms to add", remedy="give a file with one word a line")
    definition: Definition = json.loads(tokenizer.save_files()[DEFINITION_FILE])
    codec = tokenizers.Tokenizer.from_str(json.dumps(definition))
    words = {term: _pieces_for_term(codec, tokenizer, term) for term in wanted}
    known = tuple(term for term in wanted if all(_is_single_piece(tokenizer, form) for form in words[term].values()))
    vocabulary = set(tokenizer.pieces)
    pieces = dict.fromkeys(word for forms in words.values() for word in forms if word not in vocabulary)
    added = sorted(pieces, key=len) if tokenizer.kind == "unigram" else list(pieces)
    extended = _add_pieces(tokenizer, definition, added)
    _check_terms_are_pieces(extended, words)
    return ExtendedTokenizer(extended, tuple(added), known)


def _pieces_for_term(codec: tokenizers.Tokenizer, tokenizer: Tokenizer, term: str) -> dict[str, str]:
    """Return {piece: text} for a term: one piece for each form that needs its own, with or without a leading space."""
    forms = (term, f" {term}") if tokenizer.kind == "byte_bpe" else (term,)
    found: dict[str, str] = {}
    for form in forms:
        normal = codec.normalizer.normalize_str(form) if codec.normalizer is not None else form
        split = codec.pre_tokenizer.pre_tokenize_str(normal) if codec.pre_tokenizer is not None else [(normal, (0, 0))]
        if len(split) != 1:
            parts = " ".join(repr(part) for part, _ in split)
            raise TokenizerError(
                f"the term {term!r} is not one word for this tokenizer but {len(split)}: {parts}",
                remedy="give single words, without spaces, punctuation or digits inside",
            )
        found.setdefault(split[0][0], form)
    return found


def _is_single_piece(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text)
    return len(ids) == 1 and int(ids[0]) != tokenizer.special.unk


def _add_pieces(old: Tokenizer, definition: Definition, added: Sequence[str]) -> Tokenizer:
    """Return `old`, whose tokenizer.json is `definition` (changed in place), with the pieces `added`."""
    model: dict[str, Any] = definition["model"]
    files = {name: content for name, content in old.save_files().items() if name not in SENTENCEPIECE_FILES}
    if old.kind == "unigram":
        # Added tokens join the scored vocabulary in the order of their ids.
        model["vocab"] += [[piece, 0.0] for piece in old.pieces[len(model["vocab"]) :]]
        model["vocab"] += _score_pieces(model["vocab"], old, added)
        files |= _extended_model_files(old, model["vocab"])
    else:
        model["vocab"] |= {piece: i for i, piece in enumerate([*old.pieces, *added]) if piece}
    if old.kind in ("byte_bpe", "bpe"):
        model["ignore_merges"] = True
    return from_files(files | {DEFINITION_FILE: json.dumps(definition).encode()}, where="the extended tokenizer")


def _score_pieces(vocab: list[list[Any]], old: Tokenizer, added: Sequence[str]) -> list[list[Any]]:
    """Return [piece, score] of each new piece. It scores just above the best split of its word by earlier pieces."""
    lowest = min(score for _, score in vocab)
    scores = {piece: score for i, (piece, score) in enumerate(vocab) if not old.special_mask[i]}
    for piece in added:
        scores[piece] = _best_split_score(piece, scores, lowest - _UNKNOWN_PENALTY) + _SCORE_MARGIN
    return [[piece, scores[piece]] for piece in added]


def _best_split_score(word: str, scores: dict[str, float], unknown: float) -> float:
    """Return the score of the best path through `word` (Kudo 2018, section 3.1), by Viterbi."""
    best = [0.0] + [-math.inf] * len(word)
    for stop in range(1, len(word) + 1):
        for start in range(stop):
            score = scores.get(word[start:stop], unknown if stop - start == 1 else -math.inf)
            best[stop] = max(best[stop], best[start] + score)
    return best[-1]


def _extended_model_files(old: Tokenizer, vocab: list[list[Any]]) -> dict[str, bytes]:
    """Return the SentencePiece model file with the new pieces, by name; empty if there is none with the same ids."""
    files = old.save_files()
    extended: dict[str, bytes] = {}
    for name in SENTENCEPIECE_FILES & files.keys():
        proto = parse_model(files[name], name)
        count = len(proto.pieces)
        if [piece.piece for piece in proto.pieces] == list(old.pieces[:count]) and count == old.vocab_size:
            extended[name] = append_pieces(proto, [(piece, score) for piece, score in vocab[count:]])
    return extended


def _check_terms_are_pieces(extended: Tokenizer, words: dict[str, dict[str, str]]) -> None:
    for term, forms in words.items():
        if not all(_is_single_piece(extended, form) for form in forms.values()):
            raise TokenizerError(
                f"the term {term!r} cannot become one piece of this {extended.kind} tokenizer",
                remedy="leave the term out",
            )


_BYTE_LEVEL = decoders.ByteLevel()  # turns pieces of byte-level BPE back into text


@dataclass(frozen=True)
class PieceOrigins:
    """The old ids whose embeddings initialise each of V new ids: one if both tokenizers have the piece, else those into
    which the old tokenizer splits it.

    Attributes:
        offsets: [V + 1] int64; new id i is initialised from ids[offsets[i] : offsets[i + 1]], empty for an unused id.
        ids: int64, old ids of all new ids, one after another.
        copied: number of new ids that are the same piece, or have the same special role, in both tokenizers.
        averaged: number of new ids that are initialised from the old pieces of their split.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    copied: int
    averaged: int


def find_piece_origins(old: Tokenizer, new: Tokenizer) -> PieceOrigins:
    """Return the ids of `old` from which each piece of `new` is initialised.

    Raises TokenizerError: the tokenizers mark word beginnings in different ways, or have no piece in common.
    """
    if _word_marking(old) != _word_marking(new):
        raise _incompatible_error(f"a {old.kind} and a {new.kind} tokenizer mark words in different ways")
    same = _map_old_ids(old, new)
    if not same.keys() - set(new.special_mask.nonzero()[0].tolist()):
        raise _incompatible_error("the two tokenizers have no piece in common")
    split = _PieceSplitter(old)
    sources = [[same[i]] if i in same else split(piece) for i, piece in enumerate(new.pieces)]
    lengths = np.array([len(ids) for ids in sources], dtype=np.int64)
    return PieceOrigins(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=np.array([i for ids in sources for i in ids], dtype=np.int64),
        copied=len(same),
        averaged=int(np.count_nonzero(lengths)) - len(same),
    )


def _word_marking(tokenizer: Tokenizer) -> str:
    """Return a name for how pieces mark where words begin; equal names stand for the same way."""
    return "sentencepiece" if tokenizer.kind in ("unigram", "bpe") else tokenizer.kind


def _incompatible_error(problem: str) -> TokenizerError:
    return TokenizerError(
        problem,
        remedy="use the model's own tokenizer, or extend it (maskfleet tokenizer extend), or pretrain a new model with "
        "the new one",
    )


def _map_old_ids(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    """Return {new id: old id} for equal pieces and for special tokens of equal role; for these only the role counts."""
    known = {piece: i for i, piece in enumerate(old.pieces) if piece}
    same = {i: known[piece] for i, piece in enumerate(new.pieces) if piece in known}
    return same | {getattr(new.special, role): getattr(old.special, role) for role in new.names.by_role()}


class _PieceSplitter:
    """Splits pieces of another tokenizer, which marks words in the same way, into ids of this tokenizer.

    The piece of an unused id, the empty string, gives no ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizers.Tokenizer.from_str(tokenizer.save_files()[DEFINITION_FILE].decode()).model
        # A WordPiece model of "##" pieces only, so that a piece that begins with "##" is split into such pieces.
        pieces = {piece: i for i, piece in enumerate(tokenizer.pieces) if piece.startswith(CONTINUATION_PREFIX)}
        pieces = pieces | {tokenizer.names.unk: tokenizer.special.unk}
        pieces.pop(CONTINUATION_PREFIX, None)
        self._continuing = models.WordPiece(pieces, unk_token=tokenizer.names.unk, max_input_chars_per_word=1 << 20)

    def __call__(self, piece: str) -> list[int]:
        if not piece:
            return []
        return self._split(piece) or [self._tokenizer.special.unk]

    def _split(self, piece: str) -> list[int]:
        match self._tokenizer.kind:
            case "unigram" | "bpe" | "wordlevel":
                return _tokenize(self._model, piece)
            case "byte_bpe":
                text = _BYTE_LEVEL.decode([piece])
                # A piece that ends inside a character cannot be decoded, so the model splits its bytes.
                return _tokenize(self._model, piece) if "\ufffd" in text else self._tokenizer.encode(text).tolist()
            case "wordpiece":
                continues = piece.startswith(CONTINUATION_PREFIX)
                return _tokenize(self._continuing, piece) if continues else self._tokenizer.encode(piece).tolist()


def _tokenize(model: models.Model, piece: str) -> list[int]:
    """Split a piece by the model alone: a piece is already normalized and split into words."""
    return [token.id for token in model.tokenize(piece)]
