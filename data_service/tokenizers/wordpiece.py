"""WordPiece as BERT has it: words split at spaces, punctuation and CJK characters, "##" continues a word."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from data_service.errors import TokenizerError
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.specials import SpecialStyle, added_tokens, post_processor, role_config
from data_service.tokenizers.tokenizer import Tokenizer

_CHUNK = 1 << 20  # characters handed to the trainer at a time


def train_wordpiece(texts: Iterator[str], vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Learn pieces, in two passes over a temporary copy of the normalised text.

    The library's trainer numbers its alphabet, and cuts it to size, in the order of a randomly seeded hash
    map. Here the alphabet is chosen first and handed over in a fixed order: same text, same file.

    Raises:
        TokenizerError: a vocabulary without room for the alphabet.
    """
    style = options.style("wordpiece")
    normalizer = normalizers.BertNormalizer(lowercase=options.lowercase)
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as spool:
        alphabet = _alphabet(_spool(texts, normalizer, spool), options.alphabet, normalizer)
        smallest = len(style.pieces) + len(alphabet) + 1
        if vocab_size < smallest:
            raise TokenizerError(
                f"vocab_size {vocab_size} is too small: the special tokens and the alphabet of this text are "
                f"{smallest - 1} pieces",
                remedy=f"ask for {smallest} or more, or a smaller alphabet",
            )
        vocabulary = _learn(spool, alphabet, style, vocab_size, options.min_frequency)
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=style.names.unk))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(added_tokens(style))
    tokenizer.post_processor = post_processor(style)
    return Tokenizer(tokenizer.to_str(), role_config(style))


def _spool(texts: Iterator[str], normalizer: normalizers.Normalizer, spool: IO[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        normalised = normalizer.normalize_str(text)
        counts.update(normalised)
        spool.write(normalised)
        spool.write("\n")
    return counts


def _alphabet(counts: Counter[str], limit: int, normalizer: normalizers.Normalizer) -> list[str]:
    """The kept characters, and "##" before those that can stand inside a word, in code point order."""
    by_frequency = sorted(
        (character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c)
    )
    kept = sorted(by_frequency[:limit])
    return kept + [f"##{character}" for character in kept if _joins(character, normalizer)]


def _joins(character: str, normalizer: normalizers.Normalizer) -> bool:
    between = normalizer.normalize_str(f"a{character}a")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(between)) == 1


def _learn(
    spool: IO[str], alphabet: list[str], style: SpecialStyle, vocab_size: int, min_frequency: int
) -> dict[str, int]:
    """Piece to id: special tokens, the alphabet, then pieces in the order learnt."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=style.names.unk))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        limit_alphabet=0,  # nothing beyond what is handed over
        special_tokens=[*style.pieces, *alphabet],
        show_progress=False,
    )
    spool.seek(0)
    tokenizer.train_from_iterator(iter(lambda: spool.readlines(_CHUNK), []), trainer)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    return vocabulary
