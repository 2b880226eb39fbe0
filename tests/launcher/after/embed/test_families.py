"""Every family from an exported checkpoint to vectors that find and compare texts, and to a folder of the same."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from launcher.after.embed.evaluate import CellSettings, measure_checkpoint_vectors
from launcher.after.embed.settings import EmbedTraining
from launcher.after.embed.train import export_embeddings, train_embeddings
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.tasks.task import Task, parse_task
from tests.support.models.exports import FAMILIES, export
from tests.support.tasks.small_tasks import scored, sentence, write_rows

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
def test_a_family_from_checkpoint_to_vectors(tmp_path: Path, family: str, pooling: str) -> None:
    """Above chance: a rank correlation of 0, and half of what is found relevant."""
    export(FAMILIES[family], tmp_path / "model")
    table = {"texts": ["a", "b"], "label": "score", "scores": [0, 5]}
    training = EmbedTraining.model_validate(
        {
            "train": {"files": [write_rows(tmp_path / "train.jsonl", scored(96))], **table},
            "dev": {"files": [write_rows(tmp_path / "dev.jsonl", scored(80, seed=9))], **table},
            "loss": {"kind": "cosent"},
            "pooling": pooling,
            "lr": 5e-3,
            "batch": 8,
            "epochs": 6,
        }
    )
    out = tmp_path / "out"
    with open_pretrained(str(tmp_path / "model")) as pretrained:
        trained = train_embeddings(pretrained, training)
        export_embeddings(trained, pretrained, training, str(out))
    assert trained.dev["dev_spearman_cosine"] > 0.6
    with open_pretrained(str(out)) as written:
        found = measure_checkpoint_vectors(written, finding(tmp_path), CellSettings())
    assert found["ndcg@10"] > 0.75
    texts = [str(row["a"]) for row in scored(20, seed=4)]
    loaded = SentenceTransformer(str(out), device="cpu")
    np.testing.assert_allclose(loaded.encode(texts), trained.model.encode(texts), rtol=1e-5, atol=1e-6)
