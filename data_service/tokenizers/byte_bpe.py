"""Byte-level BPE, as GPT-2 and RoBERTa have it: no unknown text, a leading space kept inside the piece."""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_service.errors import TokenizerError
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.specials import added_tokens, post_processor, role_config
from data_service.tokenizers.tokenizer import Tokenizer


def train_byte_bpe(texts: Iterator[str], vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Learn merges. Ties between pairs go by id and ids start in byte order: nothing depends on hashing.

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
