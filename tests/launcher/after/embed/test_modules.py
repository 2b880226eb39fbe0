"""The folder that `SentenceTransformer(...)` loads: its vectors are those that transformers alone gives."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from encoder_core.errors import ModelError
from launcher.after.export.sentence_transformer import write_sentence_transformer
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, LENGTH, export

TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join), min_size=1, max_size=5)
POOLINGS = ("cls", "mean", "weighted_mean", "last_token", "max")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("roberta", "xlnet", "electra"):
        export(FAMILIES[name], root / name)
    return {"roberta": root / "roberta", "xlnet": root / "xlnet", "electra": root / "electra/discriminator"}


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, transformers.AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def literal(folder: Path, text: str, pooling: str, length: int) -> NDArray[np.float32]:
    """[H] One text by itself through transformers, without padding; the pooling written out."""
    tokenizer, model = loaded(folder)
    batch = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
    hidden = model(**batch).last_hidden_state[0]
    match pooling:
        case "cls":
            (place,) = (batch["input_ids"][0] == tokenizer.cls_token_id).nonzero()
            vector = hidden[place[0]]
        case "mean":
            vector = hidden.mean(0)
        case "weighted_mean":
            weights = torch.arange(1, len(hidden) + 1)[:, None]
            vector = (hidden * weights).sum(0) / weights.sum()
        case "last_token":
            vector = hidden[-1]
        case _:
            vector = hidden.amax(0)
    found: NDArray[np.float32] = vector.numpy()
    return found


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["roberta", "xlnet", "electra"])
def test_vectors_are_those_of_transformers(folders: dict[str, Path], name: str, pooling: str) -> None:
    """Whatever a text is batched with, however long it is."""
    folder = folders[name]
    write_sentence_transformer(folder, pooling=pooling, normalize=False, max_length=LENGTH - 4)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == LENGTH - 4

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def check(texts: list[str]) -> None:
        expected = [literal(folder, text, pooling, LENGTH - 4) for text in texts]
        np.testing.assert_allclose(model.encode(texts), expected, rtol=1e-4, atol=1e-5)

    check()


def test_normalised_vectors_and_prompts(folders: dict[str, Path]) -> None:
    folder, prompts = folders["roberta"], {"query": "any rank ", "document": "ünï "}
    write_sentence_transformer(folder, pooling="mean", normalize=True, max_length=LENGTH, prompts=prompts)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert model.prompts == prompts
    raw = literal(folder, "any rank reads rows", "mean", LENGTH)
    np.testing.assert_allclose(
        model.encode("reads rows", prompt_name="query"), raw / np.linalg.norm(raw), rtol=1e-4, atol=1e-5
    )
    assert model.similarity_fn_name == "cosine"


def test_a_folder_without_a_width_or_pooling_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelError, match="hidden_size"):
        write_sentence_transformer(tmp_path, pooling="mean", normalize=True, max_length=8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    with pytest.raises(ModelError, match=r"'average'.*\bpooling\b"):
        write_sentence_transformer(tmp_path, pooling="average", normalize=True, max_length=8)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
