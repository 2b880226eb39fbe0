"""From pretraining to text vectors: pairs with hard negatives, from a run's checkpoint, to sentence-transformers."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from checkpoints.gather import SingleRank
from checkpoints.load import CheckpointReader
from checkpoints.verify import find_newest_good
from data_service.ingest.options import PairFields
from launcher.after.diagnose.measures import measure_heldout_loss
from launcher.after.diagnose.states import open_checkpoint
from launcher.after.export.export import export_run
from launcher.runtime.run.evaluations import Figure
from launcher.runtime.run.record import open_run
from tests.support.data.made_up import WORDS
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

PAIRS = (
    "input={packing: pairs, negatives: 1}",
    "objective={contrastive: {temperature: 0.1}}",
    "phases=[{steps: 30, length: 32, batch: {sequences: 12}}]",
    "optimizer.adamw.lr=2e-3",
    "spikes.threshold=1000",
)


def write_pairs(path: Path) -> None:
    """A query and a positive begin with the same word, a negative with another."""
    draw = random.Random(8)
    with path.open("w") as lines:
        for _ in range(400):
            word, other = draw.sample(WORDS, 2)
            texts = [" ".join([first, *draw.choices(WORDS, k=2)]) for first in (word, word, other)]
            record = {"query": texts[0], "positive": texts[1], "negatives": [texts[2]]}
            lines.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was pretrained on plain text, and a corpus of pairs with its tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    small_runs.prepare_corpus(folder)
    finish(small_runs.new_run(folder, "pretrained"), 1)
    write_pairs(folder / "pairs.jsonl")
    tokenizer, pairs = f"{folder}/tokenizer", PairFields(count=1)
    small_runs.build_text(folder / "pairs.jsonl", f"{folder}/pairs", tokenizer, pairs=pairs)
    return folder


@pytest.mark.long
def test_pairs_from_a_pretrained_run_to_a_sentence_transformer(folder: Path, tmp_path: Path) -> None:
    run = small_runs.new_run(
        folder, "vectors", *PAIRS, f"corpus.sources.text.uri={folder}/pairs", f"start={folder}/pretrained"
    )
    finish(run, 2)
    history = small_runs.history(run)
    before, first, last = history.evaluations[0], history.evaluations[1], history.evaluations[-1]
    assert before["step"] == 0
    assert last["contrastive_loss"] < first["contrastive_loss"] < np.log(2 * first["contrastive_targets"])
    assert last["contrastive_accuracy"] > 0.3, "one of some forty queries finds its positive by chance"
    assert "perplexity" not in last

    checkpoint = open_checkpoint(open_run(run))
    figures = {
        figure.conditions: figure.value
        for figure in measure_heldout_loss(checkpoint, checkpoint.run.recipe.evaluation.samples)
    }
    for name in ("contrastive_loss", "contrastive_accuracy", "loss"):
        of_source = Figure(measure=name, value=None, source="text").conditions
        assert figures[of_source] == pytest.approx(last[name], rel=1e-4), "as the ranks recorded it"

    exported = export_run(open_run(run), None, str(tmp_path / "model"))
    assert exported.models == {".": "RobertaModel"}
    card = (tmp_path / "model/README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "objective contrastive" in card
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    vectors = model.encode(["rank reads rows", "rank and step", "nothing lost back"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.1


@pytest.mark.long
def test_it_starts_from_a_folder_too_and_says_what_it_leaves(folder: Path, tmp_path: Path) -> None:
    """The encoder whole, the head for masked tokens left there; vectors are those of the folder before any step."""
    export_run(open_run(f"{folder}/pretrained"), None, str(tmp_path / "model"))
    run = small_runs.new_run(
        folder,
        "from-folder",
        *PAIRS,
        f"corpus.sources.text.uri={folder}/pairs",
        f"start={tmp_path}/model",
        "phases=[{steps: 1, length: 32, batch: {sequences: 4}}]",
        "schedule.warmup=0",
        "optimizer.adamw.lr=1e-12",
    )
    finish(run, 1)
    (start,) = small_runs.events(run, "start")
    assert start["fresh"] == []
    assert any("lm_head" in name for name in start["left"])
    before, after = (find_newest_good(open_run(uri).store, SingleRank()) for uri in (f"{folder}/pretrained", run))
    assert before is not None
    assert after is not None
    for name in after.manifest.shapes:
        with CheckpointReader(open_run(run).store, after.manifest) as reader:
            trained = reader.read_full(name)
        with CheckpointReader(open_run(f"{folder}/pretrained").store, before.manifest) as reader:
            np.testing.assert_allclose(trained, reader.read_full(name), rtol=0, atol=1e-6)
