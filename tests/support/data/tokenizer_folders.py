"""Small folders of tokenizers as people have them: `FOLDERS` makes each by its name.

Those of `published_tokenizers` and of further classes have only a vocabulary and the class's name; `saved-...` are the
same, saved by transformers with a `tokenizer.json` and the class's name; the others have a `tokenizer.json` that no
class of transformers makes anew. Vocabularies are learnt from text of all sorts.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.data.all_sorts import documents_of_all_sorts
from tests.support.data.published_tokenizers import FAMILIES, published_folder, train_sentencepiece, write_folder

Settings = Mapping[str, object]


def _roles(cls: str, sep: str, pad: str, unk: str, mask: str) -> dict[str, object]:
    return {"cls_token": cls, "sep_token": sep, "pad_token": pad, "unk_token": unk, "mask_token": mask}


_BERT = _roles("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
_ROBERTA = _roles("<s>", "</s>", "<pad>", "<unk>", "<mask>")
_FUNNEL = _roles("<cls>", "<sep>", "<pad>", "<unk>", "<mask>")
_ESM = _roles("<cls>", "<eos>", "<pad>", "<unk>", "<mask>") | {"eos_token": "<eos>"}
_SIZE = 3000

# Classes with a vocabulary in BERT's form, and their special pieces.
_WORDPIECE: Mapping[str, tuple[str, Settings]] = {
    "distilbert": ("DistilBertTokenizer", _BERT | {"do_lower_case": True}),
    "mobilebert": ("MobileBertTokenizer", _BERT),
    "layoutlm": ("LayoutLMTokenizer", _BERT),
    "convbert": ("ConvBertTokenizer", _BERT | {"do_lower_case": False}),
    "squeezebert": ("SqueezeBertTokenizer", _BERT),
    "nomic": ("BertTokenizer", _BERT | {"do_lower_case": True, "model_max_length": 8192}),
    "german": ("BertTokenizer", _BERT | {"do_lower_case": True, "strip_accents": False}),
    "dnabert": ("BertTokenizer", _BERT | {"do_lower_case": False}),
    "splinter": ("SplinterTokenizer", _BERT | {"do_lower_case": False}),
    "funnel": ("FunnelTokenizer", _FUNNEL),
    "mpnet": ("MPNetTokenizer", _ROBERTA | {"unk_token": "[UNK]", "do_lower_case": True}),
    "esm": ("EsmTokenizer", {role: name for role, name in _ESM.items() if role != "sep_token"}),
}
_BYTE_BPE = {"longformer": "LongformerTokenizer", "bart": "BartTokenizer", "led": "LEDTokenizer"}


@cache
def _texts() -> tuple[str, ...]:
    return tuple(documents_of_all_sorts(400, seed=7))


@cache
def _vocabulary(family: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (published_folder(family, list(_texts()), Path(folder, "x"), _SIZE) / name).read_bytes()


def _published(family: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return published_folder(family, list(_texts()), folder / family, _SIZE)


def _wordpiece(name: str, folder: Path) -> Path:
    named, settings = _WORDPIECE[name]
    if name == "esm":
        pieces = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
    elif name == "dnabert":
        pieces = [*map(str, _BERT.values()), *("".join(letters) for letters in product("ACGT", repeat=4))]
    else:
        pieces = _vocabulary("bert-uncased", "vocab.txt").decode().split("\n")[:-1]
        pieces = [str(settings.get(_role(piece), piece)) for piece in pieces]
    config = {"tokenizer_class": named, **settings}
    return write_folder(
        folder / name, {"vocab.txt": ("\n".join(pieces) + "\n").encode(), "tokenizer_config.json": config}
    )


def _role(piece: str) -> str:
    return next((role for role, name in _BERT.items() if name == piece), "")


def _byte_bpe(name: str, folder: Path) -> Path:
    files = {file: _vocabulary("roberta", file) for file in ("vocab.json", "merges.txt")}
    config = {"tokenizer_class": _BYTE_BPE[name], **_ROBERTA, "add_prefix_space": name == "led"}
    return write_folder(folder / name, {**files, "tokenizer_config.json": config})


@cache
def _spm(**settings: Any) -> bytes:
    return train_sentencepiece(_texts(), _SIZE, character_coverage=0.995, **settings)


_ENDS_FIRST = {"pad_id": 0, "eos_id": 1}
_BRACKETS = "[CLS],[SEP],[MASK]"
_LLAMA_ROLES = _roles("<s>", "</s>", "<pad>", "<unk>", "<mask>")
_T5_ROLES = _roles("</s>", "</s>", "<pad>", "<unk>", "<extra_id_0>")

# Classes with a SentencePiece model: its file, SentencePiece's settings, and those of the class.
_SENTENCEPIECE: Mapping[str, tuple[str, str, Settings, Settings]] = {
    "xlm-roberta": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", {}, _ROBERTA),
    "camembert": ("CamembertTokenizer", "sentencepiece.bpe.model", {}, _ROBERTA),
    "mbart": ("MBartTokenizer", "sentencepiece.bpe.model", {}, _ROBERTA),
    "barthez": (
        "BarthezTokenizer",
        "sentencepiece.bpe.model",
        {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3},
        _ROBERTA,
    ),
    "big-bird": (
        "BigBirdTokenizer",
        "spiece.model",
        _ENDS_FIRST | {"bos_id": 2, "unk_id": 3, "control_symbols": _BRACKETS},
        {},
    ),
    "rembert": (
        "RemBertTokenizer",
        "sentencepiece.model",
        _ENDS_FIRST | {"unk_id": 2, "bos_id": -1, "control_symbols": _BRACKETS},
        {"keep_accents": False},
    ),
    "fnet": (
        "FNetTokenizer",
        "spiece.model",
        {"pad_id": 3, "control_symbols": _BRACKETS},
        {"do_lower_case": False, "keep_accents": True},
    ),
    "t5": ("T5Tokenizer", "spiece.model", _ENDS_FIRST | {"unk_id": 2, "bos_id": -1}, _T5_ROLES),
    "llama-2": (
        "LlamaTokenizer",
        "tokenizer.model",
        {
            **{"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
            **{"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True},
        },
        _LLAMA_ROLES,
    ),
}


def _sentencepiece(name: str, folder: Path) -> Path:
    named, file, trained, settings = _SENTENCEPIECE[name]
    config = {"tokenizer_class": named, **settings}
    return write_folder(folder / name, {file: _spm(**trained), "tokenizer_config.json": config})


def _saved(make: Callable[[Path], Path], folder: Path) -> Path:
    AutoTokenizer.from_pretrained(make(folder / "before")).save_pretrained(folder / "saved")
    return folder / "saved"


_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _generic(codec: tokenizers.Tokenizer, trainer: trainers.Trainer, folder: Path, roles: Settings) -> Path:
    codec.train_from_iterator(_texts(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=codec, **roles).save_pretrained(folder)
    return folder


def _llama3(folder: Path) -> Path:
    codec = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    codec.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    codec.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    roles = _BERT | {"cls_token": "<|begin_of_text|>", "sep_token": "<|end_of_text|>"}
    special = [*roles.values(), "<|reserved_0|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    return _generic(codec, trainer, folder / "llama-3", roles)


def _modernbert(folder: Path) -> Path:
    codec = tokenizers.Tokenizer(models.BPE())
    codec.normalizer = normalizers.NFC()
    codec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    codec.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, initial_alphabet=alphabet, special_tokens=list(_BERT.values()), show_progress=False
    )
    folder = _generic(codec, trainer, folder / "modernbert", _BERT)
    definition = json.loads((folder / "tokenizer.json").read_text())
    size = len(definition["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    definition["added_tokens"] += [
        {"id": size + i, "content": " " * (i + 2), **flags} for i in range(22)
    ]  # as in its published file: runs of spaces
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def _gemma(folder: Path) -> Path:
    codec = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    codec.normalizer = normalizers.Replace(" ", "▁")
    codec.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    codec.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    roles = _ROBERTA | {"cls_token": "<bos>", "sep_token": "<eos>"}
    special = [*roles.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=special, limit_alphabet=300, max_token_length=16, show_progress=False
    )
    return _generic(codec, trainer, folder / "gemma", roles)


def _word_level(folder: Path) -> Path:
    codec = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    codec.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[[^\]]+\]|Cl|Br|%\d\d|[^\s]"), "removed", invert=True)
    trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=list(_BERT.values()), show_progress=False)
    return _generic(codec, trainer, folder / "smiles", _BERT)


def _proteins(folder: Path) -> Path:
    names = [*map(str, _BERT.values()), *"LAGVSERTIDPKQNFYMHWC"]
    codec = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    codec.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=codec, **_BERT).save_pretrained(folder / "proteins")
    return folder / "proteins"


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{family: partial(_published, family) for family in FAMILIES},
    **{name: partial(_wordpiece, name) for name in _WORDPIECE},
    **{name: partial(_byte_bpe, name) for name in _BYTE_BPE},
    **{name: partial(_sentencepiece, name) for name in _SENTENCEPIECE},
    "llama-3": _llama3,
    "modernbert": _modernbert,
    "gemma": _gemma,
    "smiles": _word_level,
    "proteins": _proteins,
}
_SAVED = (
    *("bert-uncased", "electra", "convbert", "splinter", "funnel", "mpnet", "roberta", "deberta", "albert"),
    *("xlnet", "deberta-v3", *_SENTENCEPIECE),
)
FOLDERS |= {f"saved-{name}": partial(_saved, FOLDERS[name]) for name in _SAVED}
