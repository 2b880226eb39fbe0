"""Fine-tunings from end to end: small models of the families, every kind of task."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from checkpoints.errors import ExportError
from launcher.after.finetune.export import RESULTS, open_finetuned
from launcher.after.finetune.inputs import open_pieces
from launcher.after.finetune.loop import compute_logits
from launcher.after.finetune.measure import kind_of, measure, prepare
from launcher.after.finetune.pretrained import LocalModel, folder_digest
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import Diverged, FinetuneOutcome, FinetuneSettings, TaskMismatch
from launcher.after.finetune.tries import try_each
from launcher.after.tasks.examples import Sentences
from tests.support.ranks.forked import forked
from tests.support.tasks.reloaded import predictions
from tests.support.tasks.small_tasks import QUICK, Models, description, model, task

KINDS = ("classification", "pair_classification", "regression", "tagging", "span")
FAMILIES = (
    "bert",
    "roberta",
    "albert",
    "spanbert",
    "xlnet",
    "electra",
    "deberta",
    "deberta-v2",
    "deberta-v3",
    "modernbert",
    "eurobert",
    "xlm",
)
LACKING = {("eurobert", "span")}  # of transformers' classes
SHORT = QUICK.model_copy(update={"epochs": 1})


def same(a: FinetuneOutcome, b: FinetuneOutcome) -> bool:
    return a.record() == b.record() and a.losses == b.losses and np.array_equal(a.predictions, b.predictions)  # type: ignore[arg-type]


@pytest.mark.long
def test_the_same_bits_twice_whatever_ran_before(models: Models, tmp_path: Path) -> None:
    asked = task("classification", tmp_path)
    settings = FinetuneSettings(lr=3e-3, epochs=2, batch=8)
    first = finetune(models("bert"), asked, settings, 5, str(tmp_path / "first"))
    torch.manual_seed(99)
    torch.rand(17)
    again = finetune(models("bert"), asked, settings, 5, str(tmp_path / "again"))
    drawn = torch.rand(1)
    torch.manual_seed(99)
    torch.rand(17)
    assert torch.equal(torch.rand(1), drawn), "the caller's random state is its own"
    assert same(first, again)
    assert folder_digest(tmp_path / "first") == folder_digest(tmp_path / "again")
    other = finetune(models("bert"), asked, settings, 6)
    assert other.losses != first.losses


def _in_another_process(source: str, folder: str, data: str, out: str) -> None:
    found = LocalModel(source, None, Path(folder), "")
    finetune(found, task("tagging", Path(data)), FinetuneSettings(lr=3e-3, epochs=2, batch=8), 5, out)


@pytest.mark.long
@pytest.mark.parametrize("family", ["xlnet", "deberta-v3"])
def test_the_same_bits_in_another_process(models: Models, tmp_path: Path, family: str) -> None:
    given = models(family)
    for name in ("here", "there"):
        (tmp_path / f"data-{name}").mkdir()
    _in_another_process(given.source, str(given.folder), str(tmp_path / "data-here"), str(tmp_path / "here"))
    process = forked(
        _in_another_process,
        given.source,
        str(given.folder),
        str(tmp_path / "data-there"),
        str(tmp_path / "there"),
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert folder_digest(tmp_path / "here") == folder_digest(tmp_path / "there")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family, kind, marks=[] if FAMILIES.index(family) == KINDS.index(kind) else pytest.mark.long
        )
        for family in FAMILIES
        for kind in KINDS
        if (family, kind) not in LACKING
    ],
)
def test_transformers_alone_predicts_the_same_from_the_export(
    models: Models, tmp_path: Path, family: str, kind: str
) -> None:
    asked = task(kind, tmp_path)
    outcome = finetune(models(family), asked, SHORT, 3, str(tmp_path / "out"))
    found = predictions(tmp_path / "out", kind, asked.read("dev"), outcome.threshold)
    if kind == "regression":
        np.testing.assert_allclose(found, outcome.predictions, atol=1e-5)  # type: ignore[arg-type]
    elif isinstance(found, np.ndarray):
        np.testing.assert_array_equal(found, outcome.predictions)
    else:
        assert found == outcome.predictions
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    if asked.labels:
        assert [config["id2label"][str(index)] for index in range(len(asked.labels))] == asked.labels
    results = json.loads((tmp_path / "out" / RESULTS).read_bytes())
    assert results["metrics"] == outcome.metrics
    assert (results["task"], results["seed"]) == (asked.name, 3)
    assert results["checkpoint"]["digest"] == models(family).digest


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tagging", {"layers": "last_four", "freeze": True}),
        pytest.param("tagging", {"layers": "weighted"}, marks=pytest.mark.long),
        pytest.param("classification", {"pooling": "mean"}, marks=pytest.mark.long),
        ("classification", {"pooling": "max", "layers": "weighted", "freeze": True}),
    ],
)
@pytest.mark.parametrize("family", [pytest.param("xlnet", marks=pytest.mark.long), "bert"])
def test_a_head_of_ours_is_exported_beside_the_encoder(
    tmp_path: Path, family: str, kind: str, changes: dict[str, object]
) -> None:
    layers = 4 if changes.get("layers") == "last_four" else 2
    given = model(family, tmp_path / "model", layers=layers)
    asked = task(kind, tmp_path)
    settings = SHORT.model_copy(update=changes)
    outcome = finetune(given, asked, settings, 3, str(tmp_path / "out"))
    network = open_finetuned(tmp_path / "out")
    assert network.head is not None
    pieces = open_pieces(tmp_path / "out", network.config, None)
    learnt = kind_of(asked, pieces, settings)
    dev = prepare(learnt, asked.read("dev"))
    measured = measure(learnt, asked, dev, compute_logits(network, pieces, dev.prepared.rows), max_answer=30)
    if kind == "classification":
        np.testing.assert_array_equal(np.asarray(measured.predictions), np.asarray(outcome.predictions))
    else:
        assert measured.predictions == outcome.predictions
    if settings.freeze:
        before, after = (transformers.AutoModel.from_pretrained(f) for f in (given.folder, tmp_path / "out"))
        kept = dict(before.named_parameters())
        assert all(
            torch.equal(value, kept[name]) for name, value in after.named_parameters() if "pooler" not in name
        )


@pytest.mark.long
def test_the_best_epoch_is_kept_and_training_stops_when_nothing_gets_better(
    models: Models, tmp_path: Path
) -> None:
    asked = task("classification", tmp_path)
    settings = QUICK.model_copy(update={"epochs": 8, "patience": 2})
    outcome = finetune(models("bert"), asked, settings, 1, str(tmp_path / "out"))
    reached = [epoch.metrics["accuracy"] for epoch in outcome.curves]
    assert outcome.best_epoch == reached.index(max(reached)) + 1
    assert len(reached) == min(8, outcome.best_epoch + 2)
    assert outcome.metrics["accuracy"] == max(reached)
    found = predictions(tmp_path / "out", "classification", asked.read("dev"), None)
    examples = asked.read("dev")
    assert isinstance(examples, Sentences)
    assert np.mean(found == examples.labels) == max(reached)
    last = finetune(models("bert"), asked, settings.model_copy(update={"keep": "last", "patience": None}), 1)
    assert last.best_epoch == 8


@pytest.mark.long
def test_a_task_after_another_starts_from_its_encoder(models: Models, tmp_path: Path) -> None:
    first = task("pair_classification", tmp_path)
    (tmp_path / "first.yaml").write_text(
        description("pair_classification") + "finetune: {epochs: 1, lr: 1.e-3}\n"
    )
    asked = task("regression", tmp_path)
    chained = asked.model_copy(update={"after": str(tmp_path / "first.yaml")})
    chained._root = asked.root
    outcome = finetune(models("bert"), chained, SHORT, 3, str(tmp_path / "out"))
    finetune(models("bert"), first, FinetuneSettings(epochs=1, lr=1e-3), 0, str(tmp_path / "first"))
    made = LocalModel("first", None, tmp_path / "first", folder_digest(tmp_path / "first"))
    assert same(outcome, finetune(models("bert"), chained, SHORT, 3, intermediate=made))
    assert same(outcome, finetune(made, asked, SHORT, 3))
    assert outcome.losses != finetune(models("bert"), asked, SHORT, 3).losses
    results = json.loads((tmp_path / "out" / RESULTS).read_bytes())
    assert results["checkpoint"]["digest"] == models("bert").digest
    assert results["started_from"]["digest"] == made.digest


@pytest.mark.long
def test_the_best_of_several_settings_is_exported_and_all_are_on_record(
    models: Models, tmp_path: Path
) -> None:
    asked = task("classification", tmp_path)
    choices = [SHORT.model_copy(update={"lr": lr}) for lr in (1e-8, 3e-3, 1e18)]
    tried = list(try_each(models("bert"), asked, choices, 2, str(tmp_path / "out")))
    values = [None if one.outcome is None else one.outcome.metrics["accuracy"] for one in tried]
    assert values[2] is None
    results = json.loads((tmp_path / "out" / RESULTS).read_bytes())
    assert [one["metrics"] and one["metrics"]["accuracy"] for one in results["tried"]] == values
    assert results["metrics"]["accuracy"] == max(value for value in values if value is not None)
    with pytest.raises(Diverged, match=r"\bstep \d+ .*\bfinite\b"):
        list(try_each(models("bert"), asked, choices[2:], 2, None))


def test_a_foreign_folder_is_refused_before_anything_is_trained(models: Models, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="notes"):
        finetune(models("bert"), task("classification", tmp_path), SHORT, 3, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_microbatches_change_no_more_than_rounding(models: Models, tmp_path: Path) -> None:
    asked = task("tagging", tmp_path)
    whole, parts = (
        finetune(models("bert"), asked, SHORT.model_copy(update={"microbatch": size}), 3)
        for size in (None, 3)
    )
    np.testing.assert_allclose(whole.losses, parts.losses, rtol=1e-4)


def test_kinds_that_are_measured_are_not_fine_tuned(models: Models, tmp_path: Path) -> None:
    asked = task("regression", tmp_path)
    with pytest.raises(TaskMismatch, match="similarity"):
        finetune(models("bert"), asked.model_copy(update={"kind": "similarity"}), SHORT, 3)
