"""Chooses the held-out text by hash: whole documents, or if documents are few or long, stretches (runs of paragraphs).

The user requests a share of the documents. If documents are few or long, this share may by chance hold out nothing or
far too much; and a small share of little text is too little to evaluate on. So the rule is chosen when all documents
are known, before anything is written. It depends only on the set of documents, not on their order, files or workers.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from data_service.characters import code_points
from data_service.corpus.manifest import MIN_DOCUMENTS_TO_HASH_TOKENS, CorpusManifest, HeldoutRule
from data_service.errors import InputError
from data_service.ingest.scan import collapse_spaces, fold_text, is_blank
from data_service.ingest.sentences import split_sentences

EVALUATION_BYTES = 128 * 1024  # bytes of held-out text that are enough for an evaluation
MAX_SMALL_TEXT_SHARE = 0.05  # share of a small text held out at most, unless more is requested
MIN_HELDOUT_DOCUMENTS = 8  # smallest number of long documents that can represent the corpus
MAX_HELDOUT_CANDIDATES = 1024  # documents with the smallest hashes that are recorded
MIN_STRETCH_BYTES, MAX_STRETCH_BYTES = 64, 4096  # bounds of a stretch's mean size, in bytes
MIN_HELDOUT_STRETCHES = 16  # approximate smallest number of held-out stretches
_CUT_HASH_CHARACTERS = 16  # characters whose hash decides where text without sentence ends is cut
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, which is odd: a factor that mixes bits well
_BLANK_LINES = re.compile(r"(\n(?:[^\S\n]*+\n)++)")
_LEADING_BLANK_LINES = re.compile(r"\A\s*\n")


@dataclass(frozen=True)
class DocumentFigures:
    """Numbers and sizes of all documents, without copies of earlier ones.

    Attributes:
        count, size: number of documents, and bytes of their text.
        held_count, held_size: number and bytes of the documents that the requested share would hold out.
        candidates: (`low_word` of the hash, bytes) of the at most `MAX_HELDOUT_CANDIDATES` documents with the smallest
            low words, sorted.
    """

    count: int
    size: int
    held_count: int
    held_size: int
    candidates: Sequence[tuple[int, int]]


def heldout_options_from_manifest(manifest: CorpusManifest) -> dict[str, object]:
    """Return the options for holding out text as the corpus of `manifest` does."""
    return {"heldout_fraction": manifest.heldout_fraction, "heldout_rule": manifest.effective_heldout_rule}


def split_heldout_parts(rule: HeldoutRule, text: str, digest: bytes) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is held out) for each part of a document: the whole document, or its stretches.

    Neighbouring stretches of the same kind are joined. A held-out stretch separates the training text into two parts;
    white space between two parts is left out, except a line's indentation. `digest`: hash of the document.
    """
    if rule.unit == "document":
        yield text, rule.holds_out(low_word(digest))
        return
    found = ((text, end is not None and rule.holds_out(end)) for text, end in split_into_stretches(text, rule.length))
    parts = [
        ("".join(stretch for stretch, _ in run), heldout) for heldout, run in groupby(found, key=lambda pair: pair[1])
    ]
    for number, (part, heldout) in enumerate(parts):
        begun = part if number == 0 else _LEADING_BLANK_LINES.sub("", part)
        if not is_blank(begun):
            yield begun if number == len(parts) - 1 else begun.rstrip(), heldout


def low_word(digest: bytes) -> int:
    """Return the low word of a document's hash: its second half, which decides whether the document is held out."""
    return int.from_bytes(digest[8:], "big")


def hash_threshold(fraction: float) -> int:
    """Return the bound below which a share `fraction` of all low words lies."""
    return HeldoutRule.from_fraction(fraction).below


def target_heldout_bytes(text_bytes: int, fraction: float) -> int:
    """Return how many of `text_bytes` bytes of text should be held out."""
    return max(1, math.ceil(max(fraction * text_bytes, min(EVALUATION_BYTES, MAX_SMALL_TEXT_SHARE * text_bytes))))


def heldout_rule_by_documents(documents: DocumentFigures, fraction: float) -> HeldoutRule | None:
    """Return the rule that holds out whole documents; None if they are too few or too long for that.

    The requested share is used if it gives at least half of the wanted amount of text, and at most three times that
    amount or a tenth of all text.
    """
    requested = HeldoutRule(
        "document", hash_threshold(fraction), by_tokens=documents.held_count >= MIN_DOCUMENTS_TO_HASH_TOKENS
    )
    if fraction == 0:
        return requested
    wanted = target_heldout_bytes(documents.size, fraction)
    most = max(3 * wanted, documents.size // 10)
    if wanted <= 2 * documents.held_size and documents.held_size <= most and documents.held_count < documents.count:
        return requested
    taken = count = 0
    # Documents with the same low word of the hash are held out together.
    for low, alike in groupby(documents.candidates, key=lambda pair: pair[0]):
        sizes = [size for _, size in alike]
        taken, count = taken + sum(sizes), count + len(sizes)
        if taken > most:
            return None
        if taken >= wanted and (count >= MIN_HELDOUT_DOCUMENTS or taken <= count * MAX_STRETCH_BYTES):
            return HeldoutRule("document", low + 1) if count < documents.count else None
    if documents.count <= MAX_HELDOUT_CANDIDATES:
        return None
    # All candidates together are too short. So the bound follows from the wanted share of the text.
    return HeldoutRule("document", hash_threshold(wanted / documents.size))


def heldout_rule_by_queries(documents: DocumentFigures, fraction: float) -> HeldoutRule:
    """Return the rule for a corpus of pairs if `heldout_rule_by_documents` finds none, because examples
    cannot be divided into stretches.

    The rule holds out the queries with the smallest hashes, each with all its examples, until there is enough text or
    only one query is left to train on.

    Raises:
        InputError: all examples have the same query.
    """
    wanted = target_heldout_bytes(documents.size, fraction)
    queries = [
        (low, sum(size for _, size in alike)) for low, alike in groupby(documents.candidates, key=lambda pair: pair[0])
    ]
    if len(queries) < 2:
        raise InputError(
            f"all {documents.count:,} examples have the same query, so none can be held out for evaluation",
            remedy="give examples of more queries",
        )
    taken = 0
    for low, size in queries[:-1]:
        taken, below = taken + size, low + 1
        if taken >= wanted:
            break
    return HeldoutRule("document", below)


def mean_stretch_bytes(text_bytes: int, fraction: float) -> int:
    """Return the mean length of a stretch in bytes, in a corpus of `text_bytes` bytes."""
    return min(
        MAX_STRETCH_BYTES,
        max(MIN_STRETCH_BYTES, target_heldout_bytes(text_bytes, fraction) // MIN_HELDOUT_STRETCHES),
    )


def candidate_hash_threshold(text_bytes: int, fraction: float) -> int:
    """Return the bound of hashes below which paragraphs are recorded as candidates, far more than will be held out."""
    enough = max(
        4 * target_heldout_bytes(text_bytes, fraction),
        4 * MAX_HELDOUT_CANDIDATES * mean_stretch_bytes(text_bytes, fraction),
    )
    return hash_threshold(min(1.0, enough / max(text_bytes, 1)))


def heldout_rule_by_stretches(
    candidates: Mapping[int, int], size: int, fraction: float, excluded: Set[int] = frozenset()
) -> HeldoutRule:
    """Return the rule that holds out the stretches with the smallest low words, until there is enough text.

    Args:
        candidates: total bytes of the stretches that end with the same paragraph, by that paragraph's low word.
        size: bytes of all text.
        fraction: requested share of the text.
        excluded: low words of paragraphs in documents with near duplicates. They are trained on, since a near
            duplicate may contain the paragraph with another word.

    Raises:
        InputError: there is so little text that none can be held out.
    """
    wanted, length = target_heldout_bytes(size, fraction), mean_stretch_bytes(size, fraction)
    most = min(2 * wanted, round(size * (1 - MAX_SMALL_TEXT_SHARE)))
    taken, below, trained = 0, 0, list[int]()
    for low in sorted(candidates):
        if low in excluded or taken + candidates[low] > most:
            trained.append(low)
            continue
        taken, below = taken + candidates[low], low + 1
        if taken >= wanted:
            break
    if not taken and candidates.keys() - excluded:  # all candidates are too long: take the shortest
        low = min(candidates.keys() - excluded, key=lambda word: (candidates[word], word))
        taken, below = candidates[low], low + 1
    if not taken or taken > max(most, size // 2):
        raise InputError(
            f"{size:,} bytes of text are too little to hold any of it out for evaluation",
            remedy="give more text: several different paragraphs or documents",
        )
    kept = tuple(low for low in trained if low < below - 1)
    return HeldoutRule("stretch", below, length, kept)


def split_into_stretches(text: str, length: int) -> Iterator[tuple[str, int | None]]:
    """Yield (text, low word) of a document's stretches, in order. The low word is that of the stretch's last paragraph.

    Whether a paragraph ends a stretch, and whether that stretch is held out, depends only on that paragraph. So a
    held-out stretch is held out wherever it occurs. The text after the last such paragraph comes with None and is
    trained on.
    """
    pieces: list[str] = []
    for piece in _split_paragraphs(text, 4 * length):
        pieces.append(piece)
        if is_blank(piece):
            continue
        plain = fold_text(piece).encode()
        digest = hashlib.blake2b(plain, digest_size=16).digest()
        if int.from_bytes(digest[:8], "big") < hash_threshold(min(1.0, len(plain) / length)):
            yield "".join(pieces), low_word(digest)
            pieces = []
    if pieces:
        yield "".join(pieces), None


def _split_paragraphs(text: str, max_characters: int) -> Iterator[str]:
    """Yield the paragraphs of a text and the blank lines between them. Joined, they are the text.

    A paragraph of more than `max_characters` characters is split into sentences, and a longer sentence into pieces
    (`_split_by_hash`).
    """
    for paragraph in _BLANK_LINES.split(text):
        if len(collapse_spaces(paragraph)) <= max_characters:
            yield paragraph
            continue
        for sentence in split_sentences(paragraph):
            yield from ([sentence] if len(sentence) <= max_characters else _split_by_hash(sentence, max_characters))


def _split_by_hash(text: str, most: int) -> Iterator[str]:
    """Yield pieces of a long sentence. A hash of the preceding characters decides whether to cut at a character.

    Cuts are before spaces, unless hardly any character is a space.
    """
    codes = code_points(text).astype(np.uint64)
    places = np.arange(_CUT_HASH_CHARACTERS, len(codes) + 1)  # a cut is before the character with this number
    spaces = np.append(codes == ord(" "), True)[places]
    allowed = spaces if np.count_nonzero(spaces) * 100 > len(spaces) else np.ones_like(spaces)
    rate = min(1.0, 4 * len(allowed) / (most * max(1, int(np.count_nonzero(allowed)))))
    cuts = places[allowed & (_window_hashes(codes) < np.uint64(max(0, hash_threshold(rate) - 1)))]
    for start, stop in pairwise([0, *cuts.tolist(), len(text)]):
        if stop > start:
            yield text[start:stop]


def _window_hashes(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each run of `_CUT_HASH_CHARACTERS` characters; empty if there are fewer characters."""
    mixed = np.zeros(max(0, len(codes) - _CUT_HASH_CHARACTERS + 1), dtype=np.uint64)
    for offset in range(_CUT_HASH_CHARACTERS):  # a polynomial hash (Rabin and Karp)
        mixed = mixed * np.uint64(_GOLDEN_RATIO) + codes[offset : offset + len(mixed)]
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(_GOLDEN_RATIO)
