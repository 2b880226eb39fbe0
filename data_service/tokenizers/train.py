"""Trains a tokenizer. The same text and options give the same files, byte for byte.

byte_bpe: byte-level BPE as in GPT-2 and RoBERTa. A piece includes the space before it, and no text is unknown.
wordpiece: BERT's. Words are split at spaces, punctuation and CJK characters; pieces with "##" continue a word.
unigram, bpe: trained by SentencePiece (Kudo 2018; Sennrich et al. 2016).
"""

import io
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from data_service.errors import TokenizerError
from data_service.formats import StrictRecord
from data_service.processes import temporary_root
from data_service.tokenizers.merges import WORD_END_SYMBOL, learn_merges
from data_service.tokenizers.specials import STYLES, SpecialStyle, Style, added_tokens, post_processor
from data_service.tokenizers.spm import convert_model, parse_model
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.word_counts import WordCounts, count_words, word_code_points
from data_service.tokenizers.word_splits import BertSplitter, ByteBpeSplitter, SentencePieceSplitter, WordSplitter
from data_service.tokenizers.words import BYTES_BY_LETTER, CONTINUATION_PREFIX

_DEFAULT_STYLE: dict[Kind, Style] = {
    "byte_bpe": "roberta",
    "wordpiece": "bert",
    "unigram": "albert",
    "bpe": "albert",
}

MAX_TRAINING_WORD_BYTES = 1 << 25
"""Largest size of the distinct words to train on, in bytes plus one for each word; half as much for unigram."""


class TokenizerOptions(StrictRecord):
    """Settings of `train_tokenizer`. Kinds in brackets are the only ones that use the setting.

    Attributes:
        specials: family whose special tokens are used; None: roberta for byte_bpe, bert for wordpiece, albert for
            unigram and bpe.
        lowercase: whether to fold case; an error with byte_bpe, which keeps every byte.
        strip_marks: whether to remove combining marks (accents, vowel signs, tones), as BERT's uncased models do; an
            error with byte_bpe.
        min_frequency: smallest number of occurrences of a pair that is merged (byte_bpe, wordpiece).
        alphabet: number of most frequent characters that get a piece; rarer ones are unknown (wordpiece).
        coverage: share of the text's characters that must have a piece of their own (unigram, bpe).
        byte_fallback: whether other characters are spelt with 256 byte pieces; otherwise they are unknown (unigram,
            bpe).
    """

    specials: Style | None = None
    lowercase: bool = False
    strip_marks: bool = False
    min_frequency: int = Field(default=2, ge=1)
    alphabet: int = Field(default=1000, ge=1)
    coverage: float = Field(default=0.9995, gt=0.9, le=1.0)
    byte_fallback: bool = True

    def special_style(self, kind: Kind) -> SpecialStyle:
        """Return the special tokens to use for `kind`."""
        return STYLES[self.specials or _DEFAULT_STYLE[kind]]


def train_tokenizer(
    kind: Kind,
    texts: Iterable[str],
    vocab_size: int,
    options: TokenizerOptions | None = None,
    *,
    allow_fewer_ids: bool = False,
    workers: int = 1,
) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids, special tokens included. It does not depend on the order of the
    texts.

    Words are counted in a temporary folder; the most frequent ones, up to MAX_TRAINING_WORD_BYTES, are trained on. The
    tokenizer's file TRAINING_REPORT says how many words were left out.

    Args:
        kind: byte_bpe, wordpiece, unigram or bpe.
        texts: documents or lines, read once.
        vocab_size: number of ids.
        options: settings; None for the defaults.
        allow_fewer_ids: whether fewer ids are accepted if the text does not support `vocab_size`.
        workers: number of processes that count words; the result is the same for any number. With more than one, each
            process imports the `__main__` module.

    Raises:
        TokenizerError: there is no text, or the vocabulary is too small for the kind or too large for the text. Errors
            of `texts` are raised unchanged.
        OutOfSpace: the temporary folder is full.
    """
    options = options or TokenizerOptions()
    kept = _skip_blank_texts(texts)
    if kind == "byte_bpe":
        _check_byte_bpe_settings(vocab_size, options)  # fails before any text is read
    # For unigram models, SentencePiece takes 200 bytes of memory for each byte of text.
    limit = MAX_TRAINING_WORD_BYTES // 2 if kind == "unigram" else MAX_TRAINING_WORD_BYTES
    counts = count_words(kept, partial(_splitter, kind, options), limit, workers)
    match kind:
        case "byte_bpe":
            tokenizer = train_byte_bpe(counts, vocab_size, options)
        case "wordpiece":
            tokenizer = train_wordpiece(counts, vocab_size, options)
        case _:
            tokenizer = train_sentencepiece(kind, counts, vocab_size, options, at_most=allow_fewer_ids)
    if tokenizer.vocab_size != vocab_size and not allow_fewer_ids:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too large: the text supports {tokenizer.vocab_size} {kind} pieces",
            remedy=f"ask for {tokenizer.vocab_size} ids or fewer (--vocab-size), or give more text",
        )
    return tokenizer


def _splitter(kind: Kind, options: TokenizerOptions) -> WordSplitter:
    match kind:
        case "byte_bpe":
            return ByteBpeSplitter()
        case "wordpiece":
            return BertSplitter(_bert_normalizer(options), options.lowercase)
        case "unigram" | "bpe":
            return SentencePieceSplitter(_sentencepiece_normalizer(options), options.lowercase)
        case "wordlevel":
            raise TokenizerError(
                "Maskfleet cannot train tokenizers of kind wordlevel",
                remedy="train the tokenizer with the library `tokenizers`, or choose another kind",
            )


def _skip_blank_texts(texts: Iterable[str]) -> Iterator[str]:
    """Return an iterator over the texts that are not blank. Raises TokenizerError at once, not in the iterator: all
    texts are blank."""
    kept = (text for text in texts if text and not text.isspace())
    first = next(kept, None)
    if first is None:
        raise TokenizerError(
            "no text to train a tokenizer on", remedy="check the input paths and the name of the text field"
        )
    return chain([first], kept)


def train_byte_bpe(counts: WordCounts, vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Train byte-level BPE as in GPT-2 and RoBERTa: no text is unknown, and a piece includes the space before it.

    Of equally frequent pairs, the one with lower ids is merged first, so results are deterministic.
    """
    style = options.special_style("byte_bpe")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = np.full(256, WORD_END_SYMBOL, np.int32)
    for index, letter in enumerate(alphabet, start=len(style.pieces)):
        symbols[BYTES_BY_LETTER[letter]] = index
    # Words are separated by byte 0xFF, which never occurs in UTF-8.
    text = b"".join(word.encode() + b"\xff" for word in counts.words)
    symbols[0xFF] = WORD_END_SYMBOL
    vocabulary, merges = learn_merges(
        symbols[np.frombuffer(text, np.uint8)],
        counts.counts,
        [*style.pieces, *alphabet],
        vocab_size=vocab_size,
        min_frequency=options.min_frequency,
    )
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(added_tokens(style))
    tokenizer.post_processor = post_processor(style)
    return Tokenizer(tokenizer.to_str(), style.names.by_token_key(), model_files=counts.training_report_files())


def _check_byte_bpe_settings(vocab_size: int, options: TokenizerOptions) -> None:
    if options.lowercase or options.strip_marks:
        raise TokenizerError(
            "byte_bpe keeps every byte of the text, so it cannot fold case or strip marks",
            remedy="use wordpiece, unigram or bpe for an uncased vocabulary",
        )
    smallest = 256 + len(options.special_style("byte_bpe").pieces) + 1
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte_bpe needs 256 bytes, the special tokens and one merge",
            remedy=f"ask for {smallest} ids or more (--vocab-size)",
        )


def train_wordpiece(counts: WordCounts, vocab_size: int, options: TokenizerOptions) -> Tokenizer:
    """Train WordPiece. The alphabet is sorted, so the same text gives the same file; the library's own trainer orders
    and truncates it by a randomly seeded hash map.

    Raises:
        TokenizerError: the vocabulary has no room for the alphabet.
    """
    style = options.special_style("wordpiece")
    normalizer = _bert_normalizer(options)
    alphabet = _wordpiece_alphabet(counts, options.alphabet, normalizer)
    smallest = len(style.pieces) + len(alphabet) + 1
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: the special tokens and the alphabet of this text need "
            f"{smallest - 1} pieces",
            remedy=f"ask for {smallest} ids or more (--vocab-size), or give text with fewer characters",
        )
    pieces = [*style.pieces, *alphabet]
    vocabulary, _ = learn_merges(
        _wordpiece_symbols(counts.words, pieces),
        counts.counts,
        pieces,
        vocab_size=vocab_size,
        min_frequency=options.min_frequency,
        prefix=CONTINUATION_PREFIX,
    )
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=style.names.unk))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX, cleanup=False)
    tokenizer.add_special_tokens(added_tokens(style))
    tokenizer.post_processor = post_processor(style)
    return Tokenizer(tokenizer.to_str(), style.names.by_token_key(), model_files=counts.training_report_files())


def _bert_normalizer(options: TokenizerOptions) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(lowercase=options.lowercase, strip_accents=options.strip_marks)


def _wordpiece_alphabet(counts: WordCounts, limit: int, normalizer: normalizers.Normalizer) -> list[str]:
    """Return the alphabet: the `limit` most frequent characters in code point order; then, prefixed with "##", those
    that can occur inside a word."""
    codes = word_code_points(counts.words)
    totals = np.zeros(sys.maxunicode + 1, np.int64)
    np.add.at(totals, codes, np.repeat(counts.counts, [len(word) + 1 for word in counts.words]))
    totals[ord("\n")] = 0
    by_frequency = np.argsort(-totals, kind="stable")[: min(limit, np.count_nonzero(totals))]
    kept = [chr(code) for code in np.sort(by_frequency).tolist()]
    return kept + [
        f"{CONTINUATION_PREFIX}{character}" for character in kept if _can_be_inside_word(character, normalizer)
    ]


def _can_be_inside_word(character: str, normalizer: normalizers.Normalizer) -> bool:
    between = normalizer.normalize_str(f"a{character}a")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(between)) == 1


def _wordpiece_symbols(words: Sequence[str], pieces: Sequence[str]) -> NDArray[np.int32]:
    """Return the ids of each word's characters, then WORD_END_SYMBOL. Characters without a piece are dropped."""
    codes = word_code_points(words)
    absent = WORD_END_SYMBOL - 1
    begins, continues = np.full((2, sys.maxunicode + 1), absent, np.int32)
    for index, piece in enumerate(pieces):
        if len(letter := piece.removeprefix(CONTINUATION_PREFIX)) == 1:
            (begins if letter == piece else continues)[ord(letter)] = index
    begins[ord("\n")] = continues[ord("\n")] = WORD_END_SYMBOL
    behind = np.concatenate([[ord("\n")], codes[:-1]])
    symbols = np.where(behind == ord("\n"), begins[codes], continues[codes])
    kept: NDArray[np.int32] = symbols[symbols != absent]
    return kept


MODEL_FILE = "spiece.model"  # name of the model file, as in folders of ALBERT and XLNet

_MAX_WORD_BYTES = 1 << 16  # SentencePiece skips longer words; RUN_CHARACTERS characters fit, even normalised

# Fixed, not the number of cores: the trainer sums statistics per thread, so its result depends on this number.
_TRAINER_THREADS = 4


def train_sentencepiece(
    kind: Kind, counts: WordCounts, vocab_size: int, options: TokenizerOptions, *, at_most: bool = False
) -> Tokenizer:
    """Train a SentencePiece model. `at_most`: whether fewer than `vocab_size` pieces are accepted.

    The words are already normalised by the library `tokenizers`, as text will be when it is encoded. SentencePiece's
    own character map, which would treat some text differently, is not used. Words are passed in a temporary file.

    Raises:
        TokenizerError: `vocab_size` is too small for alphabet and byte pieces, or too large for the text.
    """
    style = options.special_style(kind)
    # The file has no name, so it is deleted even if the process is killed.
    with tempfile.TemporaryFile("w", encoding="utf-8", dir=temporary_root()) as file:
        counted = zip(counts.words, counts.counts.tolist(), strict=True)
        file.writelines(f"{word}\t{count}\n" for word, count in counted)
        file.flush()
        words = Path(f"/proc/self/fd/{file.fileno()}")
        model = _learn_model(kind, words, vocab_size, options, style, exact=not at_most)
    proto = parse_model(model, MODEL_FILE)
    for field in ("input", "input_format"):  # they contain the name of the temporary file
        proto.trainer_spec.ClearField(field)
    tokenizer = convert_model(proto, mask=style.names.mask, character_normalizer=_sentencepiece_normalizer(options))
    tokenizer.post_processor = post_processor(style)
    files = {MODEL_FILE: proto.SerializeToString(deterministic=True)} | counts.training_report_files()
    return Tokenizer(tokenizer.to_str(), style.names.by_token_key(), model_files=files)


def _sentencepiece_normalizer(options: TokenizerOptions) -> normalizers.Normalizer:
    """Return a normalizer that applies NFKC, replaces white space by spaces, and folds case and marks as the options
    say. Joiners, as in Persian or Sinhala words, are kept."""
    steps: list[normalizers.Normalizer] = [normalizers.NFKC()]
    if options.strip_marks:
        steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.NFC()]
    if options.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence([*steps, normalizers.Replace(Regex(r"\s"), " ")])


def _learn_model(
    kind: Kind, words: Path, vocab_size: int, options: TokenizerOptions, style: SpecialStyle, *, exact: bool
) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=str(words),
            input_format="tsv",
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=exact,
            character_coverage=options.coverage,
            byte_fallback=options.byte_fallback,
            # The words are already normalised; this rule is for programs that read only the model file.
            normalization_rule_name="identity" if options.lowercase or options.strip_marks else "nfkc",
            max_sentence_length=_MAX_WORD_BYTES,
            num_threads=_TRAINER_THREADS,
            minloglevel=2,
            # The id of each special token is its index in `style.pieces`.
            unk_id=style.pieces.index(style.names.unk),
            unk_piece=style.names.unk,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols=[piece for piece in style.pieces if piece != style.names.unk],
        )
    except RuntimeError as error:
        raise _training_error(str(error), vocab_size) from error
    return model.getvalue()


def _training_error(message: str, vocab_size: int) -> TokenizerError:
    if found := re.search(r"set it to a value <= (\d+)", message):
        return TokenizerError(
            f"vocab_size {vocab_size} is too large: the text supports {found[1]} pieces",
            remedy=f"ask for {found[1]} ids or fewer (--vocab-size), or give more text",
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return TokenizerError(
            f"vocab_size {vocab_size} is too small: special tokens, bytes and alphabet need {found[1]} pieces",
            remedy=f"ask for more than {found[1]} ids (--vocab-size)",
        )
    return TokenizerError(
        f"SentencePiece cannot train on this text: {message}", remedy="check the text and the vocabulary size"
    )
