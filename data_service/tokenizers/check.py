"""Measures how well a tokenizer fits some text, for `maskfleet tokenizer check`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_service.errors import TokenizerError
from data_service.tokenizers.loss import LossMeter, TextLoss
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.whole_text import encode_in_windows


@dataclass(frozen=True)
class TokenizerReport:
    """The fit of a tokenizer to a sample of texts.

    Attributes:
        lines, words, bytes, tokens: sizes of the sample, in lines that are not blank, words separated by white space,
            UTF-8 bytes and tokens.
        unknown: share of tokens that are the unknown token.
        coverage: share of the vocabulary's ordinary pieces that occur in the sample.
        exact: share of lines that decode to the same text.
        stable: share of lines whose decoded text is encoded to the same ids; below 1 if text is lost.
        loss: characters that the tokenizer loses in the whole texts.
    """

    lines: int
    words: int
    bytes: int
    tokens: int
    unknown: float
    coverage: float
    exact: float
    stable: float
    loss: TextLoss

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / self.words


def check_tokenizer(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenizerReport:
    """Encode and decode sample texts; return how well the tokenizer fits them. Raises TokenizerError: all texts are
    blank."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    meter = LossMeter(tokenizer)
    lines = words = size = exact = stable = 0
    for text in texts:
        [placed], _ = encode_in_windows(tokenizer, [text])
        meter.measure_texts([text], [placed])
        counts += np.bincount(placed.ids, minlength=len(counts))
        size += len(text.encode())
        words += len(text.split())
        of_text = [line for line in text.splitlines() if line.strip()]
        lines += len(of_text)
        survived = (len(of_text),) * 2
        if tokenizer.decode(placed.ids) != text:
            survived = _count_round_trips(tokenizer, of_text)
        exact, stable = exact + survived[0], stable + survived[1]
    if not counts.any() or not lines:
        raise TokenizerError("no text to check the tokenizer on", remedy="give a sample with text in it")
    return TokenizerReport(
        lines=lines,
        words=words,
        bytes=size,
        tokens=int(counts.sum()),
        unknown=float(counts[tokenizer.special.unk] / counts.sum()),
        coverage=float(np.count_nonzero(counts[~tokenizer.special_mask]) / (~tokenizer.special_mask).sum()),
        exact=exact / lines,
        stable=stable / lines,
        loss=meter.total(),
    )


def measure_loss(tokenizer: Tokenizer, texts: Iterable[str]) -> TextLoss:
    """Return how many characters the tokenizer loses in texts of any length."""
    meter = LossMeter(tokenizer)
    for text in texts:
        meter.measure_texts([text], encode_in_windows(tokenizer, [text])[0])
    return meter.total()


def _count_round_trips(tokenizer: Tokenizer, lines: Sequence[str]) -> tuple[int, int]:
    """Return how many lines decode to the same text, and how many decode to a text that is encoded to the same ids."""
    encoded = tokenizer.encode_batch(lines)
    decoded = [tokenizer.decode(ids) for ids in encoded]
    again = tokenizer.encode_batch(decoded)
    exact = sum(a == b for a, b in zip(lines, decoded, strict=True))
    return exact, sum(np.array_equal(a, b) for a, b in zip(encoded, again, strict=True))
