"""Adds whole-word pieces to a tokenizer, for continued pretraining on a special field.

Every existing piece keeps its id; new pieces follow. How a word becomes one piece depends on the kind:

wordpiece: the longest piece at a word's start wins, so being in the vocabulary is enough. A new piece may also
begin longer words now.
byte_bpe, bpe: a word that is in the vocabulary is taken whole before any merge (`ignore_merges`), so all other words
are split as before. byte_bpe adds two pieces a term: after a space, and without one. With bpe a word includes the
punctuation after it, so "term," stays split.
unigram: a piece that scores just above the best split of its word. It may also begin longer words, where that is
the better path.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from data_service.errors import TokenizerError
from data_service.tokenizers.files import DEFINITION, Definition
from data_service.tokenizers.load import from_files
from data_service.tokenizers.published import MODEL_FILES
from data_service.tokenizers.spm import append_pieces, parse_model
from data_service.tokenizers.tokenizer import Tokenizer

_UNKNOWN_PENALTY = 10.0  # below the lowest score: what SentencePiece gives a character that no piece covers
_MARGIN = 1e-3  # by which a new piece beats the best split of its word


@dataclass(frozen=True)
class Extension:
    """A tokenizer with further pieces.

    Attributes:
        tokenizer: the new one; its first ids are the old one's.
        added: new pieces, in id order.
        known: terms that were one piece already.
    """

    tokenizer: Tokenizer
    added: tuple[str, ...]
    known: tuple[str, ...]


def extend_tokenizer(tokenizer: Tokenizer, terms: Iterable[str]) -> Extension:
    """`tokenizer` with the pieces that make each term, a single word, one token. Terms may repeat or be blank.

    Raises TokenizerError: no terms, or one that the tokenizer splits before it looks for pieces, such as two words.
    """
    wanted = list(dict.fromkeys(term.strip() for term in terms if term.strip()))
    if not wanted:
        raise TokenizerError("no terms to add", remedy="give a file with one word a line")
    definition: Definition = json.loads(tokenizer.save_files()[DEFINITION])
    codec = tokenizers.Tokenizer.from_str(json.dumps(definition))
    words = {term: _words(codec, tokenizer, term) for term in wanted}
    known = tuple(term for term in wanted if all(_is_one(tokenizer, form) for form in words[term].values()))
    vocabulary = set(tokenizer.pieces)
    pieces = dict.fromkeys(word for forms in words.values() for word in forms if word not in vocabulary)
    added = sorted(pieces, key=len) if tokenizer.kind == "unigram" else list(pieces)
    extended = _rebuild(tokenizer, definition, added)
    _verify(extended, words)
    return Extension(extended, tuple(added), known)


def _words(codec: tokenizers.Tokenizer, tokenizer: Tokenizer, term: str) -> dict[str, str]:
    """Piece to the text that it stands for, in each form in which the term comes before the model."""
    forms = (term, f" {term}") if tokenizer.kind == "byte_bpe" else (term,)
    found: dict[str, str] = {}
    for form in forms:
        normal = codec.normalizer.normalize_str(form) if codec.normalizer is not None else form
        split = (
            codec.pre_tokenizer.pre_tokenize_str(normal)
            if codec.pre_tokenizer is not None
            else [(normal, (0, 0))]
        )
        if len(split) != 1:
            parts = " ".join(repr(part) for part, _ in split)
            raise TokenizerError(
                f"the term {term!r} is not one word to this tokenizer but {len(split)}: {parts}",
                remedy="give single words, without spaces, punctuation or digits inside",
            )
        found.setdefault(split[0][0], form)
    return found


def _is_one(tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text)
    return len(ids) == 1 and int(ids[0]) != tokenizer.special.unk


def _rebuild(old: Tokenizer, definition: Definition, added: Sequence[str]) -> Tokenizer:
    model: dict[str, Any] = definition["model"]
    files = {name: content for name, content in old.save_files().items() if name not in MODEL_FILES}
    if old.kind == "unigram":
        model["vocab"] += [
            [piece, 0.0] for piece in old.pieces[len(model["vocab"]) :]
        ]  # added tokens, with their ids
        model["vocab"] += _scored(model["vocab"], old, added)
        files |= _model_files(old, model["vocab"])
    else:
        model["vocab"] |= {piece: i for i, piece in enumerate([*old.pieces, *added]) if piece}
    if old.kind in ("byte_bpe", "bpe"):
        model["ignore_merges"] = True
    return from_files(files | {DEFINITION: json.dumps(definition).encode()}, where="the extended tokenizer")


def _scored(vocab: list[list[Any]], old: Tokenizer, added: Sequence[str]) -> list[list[Any]]:
    """New pieces, shortest first, each just above what the pieces before it make of its word."""
    lowest = min(score for _, score in vocab)
    scores = {piece: score for i, (piece, score) in enumerate(vocab) if not old.special_mask[i]}
    for piece in added:
        scores[piece] = _best_split(piece, scores, lowest - _UNKNOWN_PENALTY) + _MARGIN
    return [[piece, scores[piece]] for piece in added]


def _best_split(word: str, scores: dict[str, float], unknown: float) -> float:
    """The score of the best path through `word` (Kudo 2018, section 3.1), by Viterbi."""
    best = [0.0] + [-math.inf] * len(word)
    for stop in range(1, len(word) + 1):
        for start in range(stop):
            score = scores.get(word[start:stop], unknown if stop - start == 1 else -math.inf)
            best[stop] = max(best[stop], best[start] + score)
    return best[-1]


def _model_files(old: Tokenizer, vocab: list[list[Any]]) -> dict[str, bytes]:
    """The SentencePiece model that travels along, extended where its pieces have the same ids; else left out."""
    files = old.save_files()
    extended: dict[str, bytes] = {}
    for name in MODEL_FILES & files.keys():
        proto = parse_model(files[name], name)
        count = len(proto.pieces)
        if [piece.piece for piece in proto.pieces] == list(old.pieces[:count]) and count == old.vocab_size:
            extended[name] = append_pieces(proto, [(piece, score) for piece, score in vocab[count:]])
    return extended


def _verify(extended: Tokenizer, words: dict[str, dict[str, str]]) -> None:
    for term, forms in words.items():
        if not all(_is_one(extended, form) for form in forms.values()):
            raise TokenizerError(
                f"the term {term!r} does not become one piece of this {extended.kind} tokenizer",
                remedy="leave it out",
            )
