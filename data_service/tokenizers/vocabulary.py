"""Changes a model's vocabulary for continued pretraining: adds pieces to its tokenizer, or maps the pieces of another
tokenizer to the rows of the old embeddings from which they are initialised.

If whole-word pieces are added, every existing piece keeps its id, and new pieces follow. How a word becomes one piece
depends on the kind:

wordpiece: the longest piece at a word's start wins, so being in the vocabulary is enough. A new piece may also
begin longer words now.
byte_bpe, bpe: a word that is in the vocabulary becomes one piece before any merge (`ignore_merges`), so all other words
are split as before. byte_bpe adds two pieces for a term: one after a space and one without. With bpe a word includes
the punctuation after it, so "term," remains split. unigram: the new piece scores just above the best split of its
word. It may also begin longer words, if that is the better path.
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

_UNKNOWN_PENALTY = 10.0  # how far below the lowest score SentencePiece scores a character without a piece
_SCORE_MARGIN = 1e-3  # how far above its word's best split a new piece is scored


@dataclass(frozen=True)
class ExtendedTokenizer:
    """A tokenizer with further pieces.

    Attributes:
        tokenizer: extended tokenizer. Its first ids are those of the old one.
        added: new pieces, in id order.
        known: terms that were one piece already.
    """

    tokenizer: Tokenizer
    added: tuple[str, ...]
    known: tuple[str, ...]


def extend_tokenizer(tokenizer: Tokenizer, terms: Iterable[str]) -> ExtendedTokenizer:
    """Add pieces to `tokenizer` so that each term, a single word, becomes one token. Terms may repeat or be blank.

    Raises TokenizerError: there are no terms, or the tokenizer splits one before it looks for pieces, such as two
    words.
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
    """Return the pieces needed for a term, one for each form in which the model sees it, each with the form's text."""
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
    model: dict[str, Any] = definition["model"]
    files = {name: content for name, content in old.save_files().items() if name not in SENTENCEPIECE_FILES}
    if old.kind == "unigram":
        # Added tokens stand in the order of their ids.
        model["vocab"] += [[piece, 0.0] for piece in old.pieces[len(model["vocab"]) :]]
        model["vocab"] += _score_pieces(model["vocab"], old, added)
        files |= _extended_model_files(old, model["vocab"])
    else:
        model["vocab"] |= {piece: i for i, piece in enumerate([*old.pieces, *added]) if piece}
    if old.kind in ("byte_bpe", "bpe"):
        model["ignore_merges"] = True
    return from_files(files | {DEFINITION_FILE: json.dumps(definition).encode()}, where="the extended tokenizer")


def _score_pieces(vocab: list[list[Any]], old: Tokenizer, added: Sequence[str]) -> list[list[Any]]:
    """Return [piece, score] of the new pieces. Each scores just above the best split of its word by earlier pieces."""
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
    """Return the old tokenizer's SentencePiece model file, extended; empty if its pieces have other ids."""
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
                f"the term {term!r} does not become one piece of this {extended.kind} tokenizer",
                remedy="leave it out",
            )


_BYTE_LEVEL = decoders.ByteLevel()


@dataclass(frozen=True)
class PieceOrigins:
    """The old ids from whose embeddings each of V new ids is initialised: one if both tokenizers have the piece, else
    several.

    Attributes:
        offsets: [V + 1] int64; new id i is initialised from ids[offsets[i] : offsets[i + 1]], which is empty if it is
            unused.
        ids: int64, old ids.
        copied: number of new ids that are the same piece, or have the same special role, in both tokenizers.
        averaged: number of new ids that are initialised from the pieces into which the old tokenizer splits them.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    copied: int
    averaged: int


def find_piece_origins(old: Tokenizer, new: Tokenizer) -> PieceOrigins:
    """Return the ids of `old` from which each piece of `new` is initialised.

    Raises TokenizerError: the two tokenizers write words in different ways, or have no piece in common.
    """
    if _spelling(old) != _spelling(new):
        raise _unrelated_error(f"a {old.kind} and a {new.kind} tokenizer write words in different ways")
    same = _map_old_ids(old, new)
    if not same.keys() - set(new.special_mask.nonzero()[0].tolist()):
        raise _unrelated_error("the two tokenizers have no piece in common")
    split = _PieceSplitter(old)
    sources = [[same[i]] if i in same else split(piece) for i, piece in enumerate(new.pieces)]
    lengths = np.array([len(ids) for ids in sources], dtype=np.int64)
    return PieceOrigins(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=np.array([i for ids in sources for i in ids], dtype=np.int64),
        copied=len(same),
        averaged=int(np.count_nonzero(lengths)) - len(same),
    )


def _spelling(tokenizer: Tokenizer) -> str:
    return "sentencepiece" if tokenizer.kind in ("unigram", "bpe") else tokenizer.kind


def _unrelated_error(problem: str) -> TokenizerError:
    return TokenizerError(
        problem,
        remedy="use the model's own tokenizer, or extend it (maskfleet tokenizer extend); for another one start from "
        "scratch",
    )


def _map_old_ids(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    """Return the old id by new id, for ids with the same special role and for the same pieces. The role decides."""
    known = {piece: i for i, piece in enumerate(old.pieces) if piece}
    same = {i: known[piece] for i, piece in enumerate(new.pieces) if piece in known}
    return same | {getattr(new.special, role): getattr(old.special, role) for role in new.names.by_role()}


class _PieceSplitter:
    """A function that splits a piece of another vocabulary, which writes words in the same way, into ids of this one.

    The result is empty for the empty piece of an unused id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizers.Tokenizer.from_str(tokenizer.save_files()[DEFINITION_FILE].decode()).model
        # With these pieces alone WordPiece finds the longest ones in a continuing piece, from its mark on.
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
                # Part of a character is no text: its bytes are split as they stand.
                return _tokenize(self._model, piece) if "\ufffd" in text else self._tokenizer.encode(text).tolist()
            case "wordpiece":
                continues = piece.startswith(CONTINUATION_PREFIX)
                return _tokenize(self._continuing, piece) if continues else self._tokenizer.encode(piece).tolist()


def _tokenize(model: models.Model, piece: str) -> list[int]:
    """Split a piece by a model alone, because it is in the form in which text reaches the model."""
    return [token.id for token in model.tokenize(piece)]
