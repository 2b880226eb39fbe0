"""Trains a tokenizer. The same text and options give the same files, byte for byte.

byte_bpe: byte-level BPE as in GPT-2 and RoBERTa. A piece includes the space before it, and no text is unknown.
wordpiece: BERT's. Words are split at spaces, punctuation and CJK characters; "##" continues a word.
unigram, bpe: learnt by SentencePiece (Kudo 2018; Sennrich et al. 2016).
"""

import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import sentencepiece
import tokenizers
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from data_service.errors import TokenizerError
from data_service.processes import temporary_place
from data_service.tokenizers.specials import (
    STYLES,
    SpecialStyle,
    Style,
    added_tokens,
    post_processor,
    role_config,
)
from data_service.tokenizers.spm import convert_model, parse_model
from data_service.tokenizers.tokenizer import Kind, Tokenizer

_DEFAULT_STYLE: dict[Kind, Style] = {
    "byte_bpe": "roberta",
    "wordpiece": "bert",
    "unigram": "albert",
    "bpe": "albert",
}


class TokenizerOptions(BaseModel):
    """Settings of `train_tokenizer`. The kinds that use a setting are named in brackets.

    Attributes:
        specials: family whose special tokens are used; None: roberta for byte_bpe, bert for wordpiece, albert for
            unigram and bpe.
        lowercase: whether to fold case. byte_bpe refuses it, because it keeps every byte.
        strip_marks: whether to leave out combining marks: accents, vowel signs, tones. BERT's uncased models do so.
            byte_bpe refuses it likewise.
        min_frequency: smallest number of occurrences of a pair that is merged (byte_bpe, wordpiece).
        alphabet: number of most frequent characters that get a piece; rarer ones become the unknown token (wordpiece).
        coverage: share of characters, by frequency, that get a piece of their own (unigram, bpe).
        byte_fallback: whether 256 byte pieces spell other characters; otherwise they become the unknown token (unigram,
            bpe).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    specials: Style | None = None
    lowercase: bool = False
    strip_marks: bool = False
    min_frequency: int = Field(default=2, ge=1)
    alphabet: int = Field(default=1000, ge=1)
    coverage: float = Field(default=0.9995, gt=0.9, le=1.0)
    byte_fallback: bool = True

    def style(self, kind: Kind) -> SpecialStyle:
        """Return the special tokens to use for `kind`."""
        return STYLES[self.specials or _DEFAULT_STYLE[kind]]


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
        texts: documents or lines, read once. byte_bpe and wordpiece hold word counts in memory; unigram and bpe hold
            every sentence, so give them a few gigabytes at most. All but byte_bpe write the text to a temporary file.
        vocab_size: number of ids.
        options: settings; None for the defaults.
        at_most: whether fewer ids are accepted if the text does not support `vocab_size`.

    Raises:
        TokenizerError: there is no text, or the vocabulary is too small for the kind or too large for the text. Errors
            of `texts` are raised unchanged.
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
        case "wordlevel":
            raise TokenizerError(
                "a list of words is not learnt here", remedy="make it with the library `tokenizers`"
            )


def _with_text(texts: Iterable[str]) -> Iterator[str]:
    """Return an iterator over the texts that are not blank. Raises TokenizerError, before it returns: there are
    none."""
    kept = (text for text in texts if text and not text.isspace())
    first = next(kept, None)
    if first is None:
        raise TokenizerError(
            "no text to train a tokenizer on",
            remedy="check the input paths and the name of the text field",
        )
    return (part for text in chain([first], kept) for part in _without_long_runs(text))


RUN_CHARACTERS = (
    1000  # longest run without white space in training text; the trainers' time grows with its square
)
_WORDS = re.compile(rf"\s*+\S{{1,{RUN_CHARACTERS}}}+|\s++")


def _without_long_runs(text: str) -> list[str]:
    """Return the text, or its words if one is too long to learn from at once; such words in parts. Each word has the
    white space before it, which is a part of byte_bpe's pieces.
    """
    longest = max(map(len, text.split()))
    return [text] if longest <= RUN_CHARACTERS else _WORDS.findall(text)


def train_byte_bpe(texts: Iterator[str], vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Train byte-level BPE as in GPT-2 and RoBERTa: no text is unknown, and a piece includes the space before it.

    Ties between pairs are decided by id, and the first ids are in byte order, so nothing depends on hashing.

    Raises:
        TokenizerError: the vocabulary has no room for the 256 bytes, or `lowercase` is set.
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
    if options.lowercase or options.strip_marks:
        raise TokenizerError(
            "neither case nor marks can be folded with byte_bpe, which keeps every byte of the text",
            remedy="use wordpiece, unigram or bpe for an uncased vocabulary",
        )
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte_bpe needs 256 bytes, the special tokens and a merge",
            remedy=f"ask for {smallest} or more",
        )


_CHUNK = 1 << 20  # characters handed to the trainer at a time


def train_wordpiece(texts: Iterator[str], vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Train WordPiece in two passes over a temporary copy of the normalised text.

    The library's trainer numbers its alphabet, and truncates it, in the order of a randomly seeded hash map. Here the
    alphabet is chosen first and passed on in a fixed order, so that the same text gives the same file.

    Raises:
        TokenizerError: the vocabulary has no room for the alphabet.
    """
    style = options.style("wordpiece")
    normalizer = normalizers.BertNormalizer(lowercase=options.lowercase, strip_accents=options.strip_marks)
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n", dir=temporary_place()) as spool:
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
    """Return the alphabet in code point order: the `limit` most frequent characters, then "##" before those that can
    occur inside a word.
    """
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
    """Return the ids by piece: special tokens, the alphabet, then pieces in the order in which they were learnt."""
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


MODEL_FILE = "spiece.model"  # as ALBERT and XLNet call it

# SentencePiece silently skips sentences above its byte limit, so lines are cut at a space well below it.
_PART = re.compile(rf".{{1,8192}}(?!\S)|.{{1,{RUN_CHARACTERS}}}")
_MAX_BYTES = 1 << 16
_SKIPPED = "\u2585"  # a block; SentencePiece silently skips a line that contains it

# The result depends on it, because the trainer sums its statistics per thread. So it is not the number of cores.
_THREADS = 4


def train_sentencepiece(
    kind: Literal["unigram", "bpe"],
    texts: Iterator[str],
    vocab_size: int,
    options: TokenizerOptions,
    *,
    at_most: bool = False,
) -> Tokenizer:
    """Train a SentencePiece model. `at_most`: whether fewer pieces are accepted if the text does not support all.

    The text is normalised as it will be when it is encoded, by the library `tokenizers`, and SentencePiece learns from
    the result: its own character map would treat some text otherwise. The result is written to a temporary file.

    Raises:
        TokenizerError: the vocabulary is too small for alphabet and byte pieces, or too large for the text.
    """
    style = options.style(kind)
    with tempfile.TemporaryFile(
        "w", encoding="utf-8", newline="\n", dir=temporary_place()
    ) as spool:  # has no name: no death leaves it
        _write_lines(map(_mapping(options).normalize_str, texts), spool)
        lines = Path(f"/proc/self/fd/{spool.fileno()}")
        model = _learn_model(kind, lines, vocab_size, options, style, exact=not at_most)
    proto = parse_model(model, MODEL_FILE)
    proto.trainer_spec.ClearField("input")  # the temporary path
    tokenizer = convert_model(proto, mask=style.names.mask, mapping=_mapping(options))
    tokenizer.post_processor = post_processor(style)
    files = {MODEL_FILE: proto.SerializeToString(deterministic=True)}
    return Tokenizer(tokenizer.to_str(), role_config(style), model_files=files)


def _mapping(options: TokenizerOptions) -> normalizers.Normalizer:
    """Return what is done to characters: compatibility forms are folded (NFKC), all white space is a space, and case
    and marks are folded as the options say. Joiners, as in Persian or Sinhala words, stay.
    """
    steps: list[normalizers.Normalizer] = [normalizers.NFKC()]
    if options.strip_marks:
        steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.NFC()]
    if options.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, normalizers.Replace(Regex(r"\s"), " ")])


def _write_lines(texts: Iterator[str], spool: IO[str]) -> None:
    for text in texts:
        for line in text.replace(_SKIPPED, "\n").splitlines():
            spool.writelines(f"{part}\n" for part in _PART.findall(line))
    spool.flush()


def _learn_model(
    kind: Literal["unigram", "bpe"],
    lines: Path,
    vocab_size: int,
    options: TokenizerOptions,
    style: SpecialStyle,
    *,
    exact: bool,
) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=str(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=exact,
            character_coverage=options.coverage,
            byte_fallback=options.byte_fallback,
            # The text is normalised already; the rule is for those who read the model's file alone.
            normalization_rule_name="identity" if options.lowercase or options.strip_marks else "nfkc",
            max_sentence_length=_MAX_BYTES,
            num_threads=_THREADS,
            minloglevel=2,
            **_meta_pieces(style),
        )
    except RuntimeError as error:
        raise _refusal(str(error), vocab_size) from error
    return model.getvalue()


def _meta_pieces(style: SpecialStyle) -> dict[str, Any]:
    """Return the trainer's settings with which each special piece gets its index in `style.pieces` as id."""
    return {
        "unk_id": style.pieces.index(style.names.unk),
        "unk_piece": style.names.unk,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
        "control_symbols": [piece for piece in style.pieces if piece != style.names.unk],
    }


def _refusal(message: str, vocab_size: int) -> TokenizerError:
    if found := re.search(r"set it to a value <= (\d+)", message):
        return TokenizerError(
            f"vocab_size {vocab_size} is too large: the text supports {found[1]} pieces",
            remedy=f"ask for {found[1]} or fewer, or give more text",
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return TokenizerError(
            f"vocab_size {vocab_size} is too small: special tokens, bytes and alphabet are {found[1]} pieces",
            remedy=f"ask for more than {found[1]}, or a smaller coverage",
        )
    return TokenizerError(
        f"SentencePiece cannot train on this text: {message}", remedy="check the text and the vocabulary size"
    )
