"""Unigram and BPE vocabularies, learnt by SentencePiece (Kudo 2018; Sennrich et al. 2016)."""

import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import sentencepiece

from data_service.errors import TokenizerError
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.specials import SpecialStyle, post_processor, role_config
from data_service.tokenizers.spm import convert_model, parse_model
from data_service.tokenizers.tokenizer import Tokenizer

MODEL_FILE = "spiece.model"

# SentencePiece skips a sentence above its byte limit without a word: cut lines at a space well below it.
_PART = re.compile(r".{1,8192}(?!\S)|.{1,8192}")
_MAX_BYTES = 1 << 16

# Part of the result, since the trainer sums its statistics per thread: not the machine's core count.
_THREADS = 4


def train_sentencepiece(
    kind: Literal["unigram", "bpe"],
    texts: Iterator[str],
    vocab_size: int,
    options: TokenizerOptions,
    *,
    at_most: bool = False,
) -> Tokenizer:
    """Learn pieces; with `at_most` fewer, where the text supports no more.

    The text passes through a temporary file as large as itself.

    Raises:
        TokenizerError: a vocabulary too small for alphabet and byte pieces, or too large for the text.
    """
    style = options.style(kind)
    with tempfile.TemporaryFile(
        "w", encoding="utf-8", newline="\n"
    ) as spool:  # has no name: no death leaves it
        _write_lines(texts, spool)
        lines = Path(f"/proc/self/fd/{spool.fileno()}")
        model = _train(kind, lines, vocab_size, options, style, exact=not at_most)
    proto = parse_model(model, MODEL_FILE)
    proto.trainer_spec.ClearField("input")  # the temporary path
    tokenizer = convert_model(proto, mask=style.names.mask)
    tokenizer.post_processor = post_processor(style)
    files = {MODEL_FILE: proto.SerializeToString(deterministic=True)}
    return Tokenizer(tokenizer.to_str(), role_config(style), model_files=files)


def _write_lines(texts: Iterator[str], spool: IO[str]) -> None:
    for text in texts:
        for line in text.splitlines():
            spool.writelines(f"{part}\n" for part in _PART.findall(line))
    spool.flush()


def _train(
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
            normalization_rule_name="nmt_nfkc_cf" if options.lowercase else "nmt_nfkc",
            max_sentence_length=_MAX_BYTES,
            num_threads=_THREADS,
            minloglevel=2,
            **_meta_pieces(style),
        )
    except RuntimeError as error:
        raise _refusal(str(error), vocab_size) from error
    return model.getvalue()


def _meta_pieces(style: SpecialStyle) -> dict[str, Any]:
    """Settings that give each special piece its place in `style.pieces` as its id, from 0."""
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
