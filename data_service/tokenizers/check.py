"""Measures how well a tokenizer fits some text, for `maskfleet tokenizer check`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from data_service.errors import TokenizerError
from data_service.tokenizers.tokenizer import Tokenizer

_BATCH = 1000


@dataclass(frozen=True)
class TokenizerReport:
    """The fit of a tokenizer to a sample text, measured on every line that is not blank.

    Attributes:
        lines, words, bytes, tokens: sizes of the sample; words are separated by white space, bytes are UTF-8.
        unknown: share of tokens that are the unknown token.
        byte_pieces: share of tokens that spell one byte of a character that the vocabulary lacks (unigram, bpe).
        coverage: share of the vocabulary's ordinary pieces that occur in the sample.
        exact: share of lines that decode to the same text.
        stable: share of lines whose decoded text is encoded to the same ids; below 1 if text is lost.
    """

    lines: int
    words: int
    bytes: int
    tokens: int
    unknown: float
    byte_pieces: float
    coverage: float
    exact: float
    stable: float

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / self.words


def check_tokenizer(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerReport:
    """Encode and decode sample text; return how well the tokenizer fits it. Raises TokenizerError: all text is
    blank."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    lines = words = size = exact = stable = 0
    for batch in _batches(line for text in texts for line in text.splitlines() if line.strip()):
        encoded = tokenizer.encode_batch(batch)
        counts += np.bincount(np.concatenate(encoded), minlength=len(counts))
        decoded = [tokenizer.decode(ids) for ids in encoded]
        again = tokenizer.encode_batch(decoded)
        lines += len(batch)
        words += sum(len(line.split()) for line in batch)
        size += sum(len(line.encode()) for line in batch)
        exact += sum(a == b for a, b in zip(batch, decoded, strict=True))
        stable += sum(np.array_equal(a, b) for a, b in zip(encoded, again, strict=True))
    if not counts.any():
        raise TokenizerError("no text to check the tokenizer on", remedy="give a sample with text in it")
    single_bytes = [i for i, piece in enumerate(tokenizer.pieces) if _is_byte_piece(tokenizer, piece)]
    return TokenizerReport(
        lines=lines,
        words=words,
        bytes=size,
        tokens=int(counts.sum()),
        unknown=float(counts[tokenizer.special.unk] / counts.sum()),
        byte_pieces=float(counts[single_bytes].sum() / counts.sum()),
        coverage=float(np.count_nonzero(counts[~tokenizer.special_mask]) / (~tokenizer.special_mask).sum()),
        exact=exact / lines,
        stable=stable / lines,
    )


def _is_byte_piece(tokenizer: Tokenizer, piece: str) -> bool:
    return tokenizer.kind in ("unigram", "bpe") and len(piece) == 6 and piece.startswith("<0x")


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    return iter(lambda: list(islice(lines, _BATCH)), [])
