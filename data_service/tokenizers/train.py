"""Train a tokenizer: the same text and options give the same files, byte for byte."""

from collections.abc import Iterable, Iterator
from itertools import chain

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_service.errors import TokenizerError
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.sentencepiece import train_sentencepiece
from data_service.tokenizers.specials import added_tokens, post_processor, role_config
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.wordpiece import train_wordpiece


def train_tokenizer(
    kind: Kind,
    texts: Iterable[str],
    vocab_size: int,
    options: TokenizerOptions | None = None,
    *,
    at_most: bool = False,
) -> Tokenizer:
    """Learn a vocabulary of exactly `vocab_size` ids, special tokens included.

    Args:
        kind: byte_bpe, wordpiece, unigram or bpe.
        texts: documents or lines, read once. byte_bpe and wordpiece hold word counts in memory; unigram and
            bpe hold every sentence, so a few gigabytes are plenty. All but byte_bpe write the text to a
            temporary file.
        vocab_size: number of ids.
        options: settings; None for the defaults.
        at_most: accept fewer ids if the text does not support `vocab_size`.

    Raises:
        TokenizerError: no text; a vocabulary too small for the kind or too large for the text. What `texts`
            raises comes through as it is.
    """
    options = options or TokenizerOptions()
    tokenizer = _train(kind, _with_text(texts), vocab_size, options, at_most)
    if tokenizer.vocab_size != vocab_size and not at_most:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too large: the text supports {tokenizer.vocab_size} {kind} pieces",
            remedy=f"ask for {tokenizer.vocab_size} ids or fewer (--vocab-size), or give more text",
        )
    return tokenizer


def _train(
    kind: Kind, texts: Iterator[str], vocab_size: int, options: TokenizerOptions, at_most: bool
) -> Tokenizer:
    match kind:
        case "byte_bpe":
            return train_byte_bpe(texts, vocab_size, options)
        case "wordpiece":
            return train_wordpiece(texts, vocab_size, options)
        case "unigram" | "bpe":
            return train_sentencepiece(kind, texts, vocab_size, options, at_most=at_most)


def _with_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts that are not blank. Raises TokenizerError at once if there is none."""
    kept = (text for text in texts if text and not text.isspace())
    first = next(kept, None)
    if first is None:
        raise TokenizerError(
            "no text to train a tokenizer on",
            remedy="check the input paths and the name of the text field",
        )
    return chain([first], kept)


def train_byte_bpe(texts: Iterator[str], vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Byte-level BPE, as GPT-2 and RoBERTa have it: no unknown text, a leading space kept inside the piece.

    Ties between pairs go by id and ids start in byte order: nothing depends on hashing.

    Raises:
        TokenizerError: a vocabulary without room for the 256 bytes, or lowercase asked for.
    """
    style = options.style("byte_bpe")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _check(vocab_size, len(alphabet) + len(style.pieces) + 1, options)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=options.min_frequency,
        initial_alphabet=alphabet,
        special_tokens=added_tokens(style),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = post_processor(style)
    return Tokenizer(tokenizer.to_str(), role_config(style))


def _check(vocab_size: int, smallest: int, options: TokenizerOptions) -> None:
    if options.lowercase:
        raise TokenizerError(
            "lowercase: true with byte_bpe, which keeps every byte of the text",
            remedy="use wordpiece, unigram or bpe for an uncased vocabulary",
        )
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte_bpe needs 256 bytes, the special tokens and a merge",
            remedy=f"ask for {smallest} or more",
        )
