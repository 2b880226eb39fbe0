"""Writes the files that tell `SentenceTransformer(folder)` how a text's hidden states become one vector.

These are plain JSON files, written without sentence-transformers, in the form that its versions 2 to 6 read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from checkpoints.hf.folder import CONFIG
from encoder_core.errors import ModelError

Pooling = Literal["cls", "mean", "weighted_mean", "last_token", "max"]
MODULES_FILE = "modules.json"  # lists the modules that a SentenceTransformer applies one after another
SETTINGS_FILE = "config_sentence_transformers.json"  # holds prompts and the similarity function

_POOLING_SWITCHES = {  # fields of the pooling module's config.json, by sentence-transformers' name of the pooling
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_CLASS_TOKEN_LAST_TYPES = ("xlnet",)  # model types whose class token is the last token
# Names of the hidden size in config.json: in most models', in XLNet's, in XLM's, in DistilBERT's.
_WIDTH_FIELDS = ("hidden_size", "d_model", "emb_dim", "dim")
_MODULE_PACKAGE = "sentence_transformers.models"  # the package of the classes that modules.json names


def sbert_pooling_name(pooling: str, model_type: str) -> str:
    """Return sentence-transformers' name of a pooling. `cls` means the class token, wherever the model has it.

    XLNet's class token is the last one, so `cls` becomes `lasttoken` there. The side of padding does not matter. Raises
    ModelError if there is no such pooling.
    """
    if pooling not in get_args(Pooling):
        raise ModelError(f"{pooling!r} is not a pooling", remedy=f"choose one of {', '.join(get_args(Pooling))}")
    if pooling == "cls" and model_type in _CLASS_TOKEN_LAST_TYPES:
        return "lasttoken"
    return pooling.replace("_", "")


def write_sentence_transformer(
    folder: Path,
    *,
    pooling: str,
    normalize: bool,
    max_length: int,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Add files to the transformers folder `folder` so that `SentenceTransformer(folder)` loads it.

    Args:
        folder: folder that is being built and already has config.json. This function does not publish it.
        pooling: `cls`, `mean`, `weighted_mean` (later tokens weigh more), `last_token` or `max`, over the last layer.
        normalize: whether vectors are scaled to length 1.
        max_length: largest number of tokens of a text, including special ones; longer texts are cut.
        prompts: texts that are put before an encoded text, by name (`query`, `document`).

    Raises ModelError if there is no such pooling, or config.json lacks the model's width.
    """
    fields = json.loads((folder / CONFIG).read_bytes())
    width = next((fields[name] for name in _WIDTH_FIELDS if name in fields), None)
    if not isinstance(width, int):
        raise ModelError(f"{folder / CONFIG} has no hidden_size", remedy="give the folder of an encoder")
    mode = sbert_pooling_name(pooling, str(fields.get("model_type")))
    switches = {switch: name == mode for name, switch in _POOLING_SWITCHES.items()}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * normalize)]
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write_json(folder / "1_Pooling" / CONFIG, {"word_embedding_dimension": width, **switches})
    if normalize:
        _write_json(folder / "2_Normalize" / CONFIG, {})
    _write_json(
        folder / SETTINGS_FILE,
        {"prompts": dict(prompts or {}), "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    _write_json(
        folder / MODULES_FILE,
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{_MODULE_PACKAGE}.{name}"}
            for index, (path, name) in enumerate(modules)
        ],
    )


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
