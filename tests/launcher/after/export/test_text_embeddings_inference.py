"""An exported folder has what text-embeddings-inference reads: the table of the guide, from its source of 24 July 2026
(router/src/lib.rs, backends/ort/src/lib.rs)."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_service.tokenizers.load import load_tokenizer
from launcher.after.export.sentence_transformer import write_sentence_transformer
from tests.support.models.exports import FAMILIES, export

POOLINGS = ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken")
NEEDED: dict[str, dict[str, type]] = {
    "config.json": {
        "architectures": list,
        "model_type": str,
        "max_position_embeddings": int,
        "hidden_size": int,
        "num_hidden_layers": int,
    },
    "1_Pooling/config.json": dict.fromkeys(POOLINGS, bool),
    "sentence_bert_config.json": {"max_seq_length": int},
    "config_sentence_transformers.json": {"prompts": dict},
    "tokenizer.json": {"model": dict},
}
OTHER_NAMES = ("xlm", "xlnet")  # families whose config.json names the sizes otherwise
OFFSET = ("roberta",)  # model types whose first position is behind the padding id


def lacking(folder: Path) -> list[str]:
    """The fields that are missing or of another kind, as file: field; and a pooling that it does not have."""
    contents = {name: json.loads((folder / name).read_bytes()) for name in NEEDED}
    missing = [
        f"{name}: {field}"
        for name, fields in NEEDED.items()
        for field, kind in fields.items()
        if not isinstance(contents[name].get(field), kind)
    ]
    chosen: dict[str, Any] = contents["1_Pooling/config.json"]
    return missing + ["a pooling"] * (not any(chosen.get(name) for name in POOLINGS))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_vectors_has_every_field(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    export(family, tmp_path)
    folder = tmp_path / family.folders[-1]
    write_sentence_transformer(folder, pooling="mean", normalize=True, max_length=24, prompts={"query": "q: "})
    if name in OTHER_NAMES:
        assert {line.partition(":")[0] for line in lacking(folder)} == {"config.json"}
        return
    assert lacking(folder) == []
    fields, tokenizer = json.loads((folder / "config.json").read_bytes()), load_tokenizer(str(folder))
    assert fields["pad_token_id"] == tokenizer.special.pad
    offset = fields["pad_token_id"] + 1 if fields["model_type"] in OFFSET else 0
    assert fields["max_position_embeddings"] - offset >= 24, "its longest text, without sentence_bert_config.json"


@pytest.mark.parametrize(
    ("pooling", "known"), [("cls", True), ("last_token", True), ("max", False), ("weighted_mean", False)]
)
def test_poolings_that_it_has_are_told(pooling: str, known: bool, tmp_path: Path) -> None:
    export(FAMILIES["bert"], tmp_path)
    write_sentence_transformer(tmp_path, pooling=pooling, normalize=True, max_length=24)
    assert lacking(tmp_path) == ([] if known else ["a pooling"])
