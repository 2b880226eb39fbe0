"""Embedding training: every loss learns, every family too, and the seed decides the result."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from encoder_core.errors import ModelError
from launcher.after.embed.evaluate import VectorMeasureSettings, measure_checkpoint_vectors
from launcher.after.embed.settings import EmbedTrainingSettings
from launcher.after.embed.train import export_embeddings, train_embeddings
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.after.tasks.task import Task, parse_task
from tests.support.models.exports import FAMILIES
from tests.support.tasks.small_tasks import Models, scored, sentence, triplets, write_rows

PAIRS = {"texts": ["a", "b"], "label": "score", "scores": [0, 5]}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": (
        {"kind": "softmax"},
        {"texts": ["a", "b"], "label": "relation", "classes": ["same", "other"]},
    ),
    "cosine": ({"kind": "cosine"}, PAIRS),
    "triplet": ({"kind": "triplet", "margin": 1.0}, {"texts": ["a", "p", "n"]}),
    "multiple_negatives": ({"kind": "multiple_negatives", "symmetric": True}, {"texts": ["a", "p"]}),
    "with_negatives": ({"kind": "multiple_negatives"}, {"texts": ["a", "p", "n"]}),
    "cached": ({"kind": "multiple_negatives", "mini_batch": 4}, {"texts": ["a", "p", "n"]}),
    "cosent": ({"kind": "cosent"}, PAIRS),
    "angle": ({"kind": "angle"}, PAIRS),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embed")
    write_rows(root / "pairs.jsonl", scored(96))
    write_rows(root / "triplets.jsonl", triplets(96))
    write_rows(root / "dev.jsonl", scored(80, seed=9))
    return root


@pytest.fixture(scope="module")
def bert(models: Models) -> LocalModel:
    return models("bert")


def settings(place: Path, loss: str = "cosent", **changes: Any) -> EmbedTrainingSettings:
    kind, table = LOSSES[loss]
    file = "triplets.jsonl" if "p" in table["texts"] else "pairs.jsonl"
    values: dict[str, Any] = {
        "train": {"files": [str(place / file)], **table},
        "dev": {"files": [str(place / "dev.jsonl")], **PAIRS},
        "loss": kind,
        "lr": 2e-3,
        "max_length": 16,
        **changes,
    }
    return EmbedTrainingSettings.model_validate(values)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(place: Path, bert: LocalModel, loss: str) -> None:
    """Rank correlation on sentences of its own, from that of a random network to nearly all."""
    before = train_embeddings(bert, settings(place, loss, epochs=1, lr=1e-12)).dev["dev_spearman_cosine"]
    trained = train_embeddings(bert, settings(place, loss, epochs=6, batch=8, lr=5e-3))
    assert trained.steps == 6 * 12
    assert trained.dev["dev_spearman_cosine"] > max(0.7, before + 0.1)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cosine", "cached", "cosent"])
def test_matryoshka_trains_the_beginning_of_the_vector(place: Path, bert: LocalModel, loss: str) -> None:
    """Four numbers of 32 rank pairs nearly as all of them do."""
    trained = train_embeddings(bert, settings(place, loss, epochs=6, batch=8, lr=5e-3, matryoshka=[32, 4]))
    rows = scored(80, seed=9)
    first, second = (trained.model.encode([str(row[side]) for row in rows])[:, :4] for side in "ab")
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(first), torch.tensor(second))
    assert spearmanr(cosines, [row["score"] for row in rows]).statistic > 0.7


@pytest.mark.long
def test_the_seed_decides(place: Path, bert: LocalModel) -> None:
    """Also of the softmax's head, which is drawn before the trainer begins."""
    first, again, other = (
        weights(train_embeddings(bert, settings(place, "softmax", seed=seed, dev=None)).model) for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.long
def test_the_best_weights_on_dev_are_kept(place: Path, bert: LocalModel, caplog: pytest.LogCaptureFixture) -> None:
    training = settings(place, "cosent", epochs=4, lr=2e-2)
    with caplog.at_level("INFO"):
        last = train_embeddings(bert, training.model_copy(update={"keep": "last"}))
    found = re.findall(r"dev spearman (-?[\d.]+)", caplog.text)
    assert len(found) == 4
    best = train_embeddings(bert, training)
    assert best.dev["dev_spearman_cosine"] == pytest.approx(max(map(float, found)), abs=1e-3)
    assert last.dev["dev_spearman_cosine"] == pytest.approx(float(found[-1]), abs=1e-3)


@pytest.mark.long
def test_weights_that_are_no_numbers_are_not_handed_out(place: Path, bert: LocalModel) -> None:
    with pytest.raises(ModelError, match=r"\bstep \d+ .*\bfinite\b"):
        train_embeddings(bert, settings(place, "cosine", lr=1e38, dev=None, warmup=0.0))


FIND = """name: find
kind: retrieval
published: here
files: {test: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels.tsv}}
format: beir
metrics: ["ndcg@10", "mrr@10"]
"""


def finding(folder: Path) -> Task:
    """Queries about a topic; the documents about it are relevant, which half of all are."""
    draw = random.Random(2)
    for name, count in (("corpus", 40), ("queries", 10)):
        texts = [{"_id": f"{name}{i}", "text": sentence(draw, i % 2)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    lines = [f"queries{q}\tcorpus{d}\t1\n" for q in range(10) for d in range(40) if q % 2 == d % 2]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return parse_task(FIND, "find", str(folder))


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_finds_and_compares_texts(
    place: Path, models: Models, tmp_path: Path, family: str, pooling: str
) -> None:
    """Above chance: a rank correlation of 0, and half of what is found relevant. The folder gives the same vectors."""
    training, out = settings(place, epochs=6, batch=8, lr=5e-3, pooling=pooling), tmp_path / "out"
    trained = train_embeddings(models(family), training)
    export_embeddings(trained, models(family), training, str(out))
    assert trained.dev["dev_spearman_cosine"] > 0.6
    with open_pretrained(str(out)) as written:
        found = measure_checkpoint_vectors(written, finding(tmp_path), VectorMeasureSettings())
    assert found["ndcg@10"] > 0.75
    texts = [str(row["a"]) for row in scored(20, seed=4)]
    loaded = SentenceTransformer(str(out), device="cpu")
    np.testing.assert_allclose(loaded.encode(texts), trained.model.encode(texts), rtol=1e-5, atol=1e-6)
