"""Runs that distil: taught by a run or a folder, killed and resumed to the bit, held to the teacher they began with."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from checkpoints.gather import SingleRank
from checkpoints.verify import find_newest_good
from data_service.errors import UserError
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.after.diagnose.measures import measure_heldout_loss
from launcher.after.diagnose.states import open_checkpoint
from launcher.after.export.export import export_run
from launcher.errors import RunChanged
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs
from tests.support.runs.small_runs import ensure_same, history, losses, new_run, reconciled

pytestmark = pytest.mark.cluster

SHORT = (
    "phases=[{steps: 6, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 2}, keep_last: 3}",
    "evaluation={every: {steps: 3}, samples: 12}",
)
MODEL = "{family: roberta, layers: 2, hidden: 32, heads: 2, feed_forward: 64, max_length: 64}"


def taught_by(uri: object, *further: str, model: str = MODEL, step: str = "null") -> tuple[str, ...]:
    teachers = f"teachers: [{{uri: '{uri}', step: {step}, model: {model}}}]"
    return (
        *SHORT,
        "model.layers=1",
        "start=teacher",
        f"objective.distil={{{teachers}}}",
        "objective.cosine={weight: 1.0}",
        *further,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher's run, and its export."""
    folder = tmp_path_factory.mktemp("runs")
    small_runs.prepare_corpus(folder)
    finish(new_run(folder, "teacher", *SHORT), 1)
    export_run(open_run(f"{folder}/teacher"), None, f"{folder}/exported")
    return folder


@pytest.mark.long
def test_killed_and_resumed_it_is_the_same_run(folder: Path) -> None:
    """On two ranks at ZeRO 2 and 3; the export of a teacher is the same teacher as its run."""
    undisturbed = {}
    for stage in (2, 3):
        whole = finish(new_run(folder, f"whole{stage}", *taught_by(folder / "teacher", f"zero={stage}")), 2)
        killed = new_run(folder, f"killed{stage}", *taught_by(folder / "exported", f"zero={stage}"))
        ended = run_group(killed, 2, kill={1: 4})
        assert ended.codes[1] == KILLED
        ensure_same(finish(killed, 2), whole, 6)
        undisturbed[stage] = losses(whole)
    assert undisturbed[2] == pytest.approx(undisturbed[3], rel=1e-5)
    run = open_run(f"{folder}/whole2")
    assert [teacher.step for teacher in run.record.inputs.teachers] == [6]
    good = find_newest_good(run.store, SingleRank())
    assert good is not None
    assert not [name for name in good.manifest.tensor_shapes if "teacher" in name or "frozen" in name]
    assert not [name for name in good.manifest.tensor_shapes if "layers.1." in name]
    figures = history(f"{folder}/whole2").evaluations[-1]
    assert {"mlm_loss", "distil_loss", "distil_accuracy", "cosine_loss"} <= figures.keys()
    assert 0 < figures["cosine_loss"] < 1
    start = next(event for event in history(f"{folder}/whole2").events if event["kind"] == "start")
    assert start["layers"] == [0]
    assert start["start_step"] == 6
    assert start["fresh"] == []


@pytest.mark.long
def test_losses_of_a_checkpoint_are_measured_with_the_teacher(folder: Path) -> None:
    run = finish(new_run(folder, "measured", *taught_by(folder / "teacher")), 1)
    found = {(f.measure, f.length, f.source): f.value for f in measure_heldout_loss(open_checkpoint(open_run(run)), 12)}
    recorded = history(run).evaluations[-1]
    for name in ("distil_loss", "cosine_loss", "mlm_loss"):
        assert found[name, 32, None] == pytest.approx(recorded[name], rel=1e-4)


@pytest.mark.long
def test_a_teacher_that_was_moved_is_the_same_and_one_that_was_trained_on_is_another(folder: Path) -> None:
    run = new_run(folder, "held", *taught_by(folder / "exported"))
    finish(run, 1, stop_at=3)
    moved = with_assignments(open_run(run).recipe, (f"objective.distil.teachers.0.uri={folder}/teacher",))
    assert open_run(run).recipe != moved
    reconciled(open_run(run), recipe=moved, accept_changes=False, now=datetime.now(UTC))
    earlier = with_assignments(moved, ("objective.distil.teachers.0.step=2",))
    with pytest.raises(RunChanged, match=r"teachers\.0 \(weights\)"):
        reconciled(open_run(run), recipe=earlier, accept_changes=False, now=datetime.now(UTC))

    # The commit that the run began with is asked for again, whatever its teacher has learned since.
    assert [t.step for t in open_run(run).record.inputs.teachers] == [None]
    other = new_run(folder, "other", *SHORT, "seed=9")
    finish(other, 1)
    export_run(open_run(other), None, f"{folder}/second")
    lying = new_run(folder, "lying", *taught_by(folder / "second"))
    for name in ("config.json", "model.safetensors"):
        (folder / "second" / name).write_bytes((folder / "exported" / name).read_bytes())
    ended = run_group(lying, 2)
    assert all(ended.codes), "no rank trains with another teacher"
    assert re.search(r"\bother weights\b", ended.output)


def small(**changes: object) -> str:
    values = {
        "family": "roberta",
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "feed_forward": 64,
        "max_length": 64,
    }
    return "{" + ", ".join(f"{key}: {value}" for key, value in (values | changes).items()) + "}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda f: taught_by(f / "nothing"), "neither a run nor a folder"),
        (lambda f: taught_by(f / "teacher", model=small(layers=3)), "layers is 3 here and 2 there"),
        (
            lambda f: taught_by(f / "teacher", "phases.0.length=80", "model.max_length=80"),
            "at most 64 tokens a row",
        ),
        (lambda f: taught_by(f / "teacher", "model.vocab=400"), "has 320 ids, but the student has 400"),
        (lambda f: taught_by(f / "stranger"), "another tokenizer"),
        (lambda f: taught_by("s3://your-bucket/runs/teacher"), "placeholders"),
        (lambda f: taught_by(f / "teacher", step="5"), "no checkpoint of step 5"),
        (lambda f: (*taught_by(f / "teacher"), "model.layers=3"), "and the teacher only 2"),
        (lambda f: (*SHORT, "start=teacher"), "has no teacher"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_when_the_run_is_created(
    folder: Path,
    request: pytest.FixtureRequest,
    settings: Callable[[Path], tuple[str, ...]],
    message: str,
) -> None:
    if not (folder / "stranger").exists():
        _speak_another_language(folder)
    name = request.node.callspec.id.replace("/", "_")
    with pytest.raises((UserError, ModelError), match=message):
        new_run(folder, name, *settings(folder))
    assert open_store(f"{folder}/{name}").size("run.json") is None


def _speak_another_language(folder: Path) -> None:
    """The exported teacher, with a tokenizer that was trained to other pieces."""
    from data_service.tokenizers.load import save_tokenizer
    from data_service.tokenizers.train import train_tokenizer

    (folder / "stranger").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "stranger" / name).write_bytes((folder / "exported" / name).read_bytes())
    texts = ["quite another text, of another kind"] * 50
    save_tokenizer(train_tokenizer("byte_bpe", texts, 270), str(folder / "stranger"))
