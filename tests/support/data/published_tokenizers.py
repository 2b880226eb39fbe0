"""Small tokenizer folders laid out as each family's models were published, without `tokenizer.json`.

File names, special pieces with their ids, and settings are those of the published folders; the vocabularies are
learnt from a little text. Settings of SentencePiece are those of the official READMEs: the marks that ALBERT and
XLNet take out of text as symbols of their own, and DeBERTa's model without a [MASK].
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from data_service.tokenizers.train import TokenizerOptions, train_tokenizer

FAMILIES = (
    "bert-uncased",
    "bert-cased",
    "bert-chinese",
    "electra",
    "spanbert",
    "roberta",
    "deberta",
    "albert",
    "xlnet",
    "deberta-v2",
    "deberta-v3",
)
_SYMBOLS = ["(", ")", '"', "-", ".", "–", "£", "€"]  # noqa: RUF001


def published_folder(family: str, texts: list[str], folder: Path, size: int = 1200) -> Path:
    """Write the folder of one of `FAMILIES`."""
    return write_folder(folder, _files(family, texts, size))


def write_folder(folder: Path, files: Mapping[str, bytes | object]) -> Path:
    """Write bytes as they are, everything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


Files = dict[str, bytes | dict[str, object]]
"""A folder: bytes, or what is written as JSON."""


def _files(family: str, texts: list[str], size: int) -> Files:
    lowercase = family in ("bert-uncased", "electra")
    config: Files
    match family:
        case "bert-uncased" | "bert-cased" | "bert-chinese" | "electra" | "spanbert":
            model = "electra" if family == "electra" else "bert"
            files = _wordpiece(texts, size, lowercase)
            if family != "spanbert":  # whose folder has no settings, so that it is read as uncased
                files["tokenizer_config.json"] = {"do_lower_case": lowercase, "model_max_length": 512}
            return files | {"config.json": {"model_type": model}}
        case "roberta":
            return _byte_bpe(texts, size, "roberta") | {"config.json": {"model_type": "roberta"}}
        case "deberta":
            settings = {"do_lower_case": False, "vocab_type": "gpt2"}
            config = {"config.json": {"model_type": "deberta"}, "tokenizer_config.json": settings}
            return {**_byte_bpe(texts, size, "deberta"), **config}
        case "albert":
            config = {
                "config.json": {"model_type": "albert"},
                "tokenizer_config.json": {"model_max_length": 512},
            }
            return {"spiece.model": _albert(texts, size), **config}
        case "xlnet":
            return {"spiece.model": _xlnet(texts, size), "config.json": {"model_type": "xlnet"}}
        case _:
            settings = {"do_lower_case": False, "vocab_type": "spm"}
            config = {"config.json": {"model_type": "deberta-v2"}, "tokenizer_config.json": settings}
            return {"spm.model": _deberta_v2(texts, size), **config}


def _wordpiece(texts: list[str], size: int, lowercase: bool) -> Files:
    trained = train_tokenizer("wordpiece", texts, size, TokenizerOptions(lowercase=lowercase, alphabet=600))
    return {"vocab.txt": trained.save_files()["vocab.txt"]}


def _byte_bpe(texts: list[str], size: int, style: str) -> Files:
    options = TokenizerOptions.model_validate({"specials": style})
    files = train_tokenizer("byte_bpe", texts, size, options).save_files()
    return {name: files[name] for name in ("vocab.json", "merges.txt")}


def _albert(texts: list[str], size: int) -> bytes:
    ids = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    return train_sentencepiece(
        texts, size, control_symbols=["[CLS]", "[SEP]", "[MASK]"], user_defined_symbols=_SYMBOLS, **ids
    )


def _xlnet(texts: list[str], size: int) -> bytes:
    controls = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
    return train_sentencepiece(texts, size, control_symbols=controls, user_defined_symbols=["<eop>", *_SYMBOLS])


def _deberta_v2(texts: list[str], size: int) -> bytes:
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    pieces = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    return train_sentencepiece(texts, size, **ids, **pieces)


def train_sentencepiece(texts: Sequence[str], size: int, **settings: Any) -> bytes:
    """A SentencePiece model. By default its special pieces are those of SentencePiece and fairseq."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.splitlines() if line.strip()]),
        model_writer=model,
        vocab_size=size,
        num_threads=1,
        minloglevel=2,
        **{"character_coverage": 0.9995} | settings,
    )
    return model.getvalue()
