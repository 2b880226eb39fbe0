"""Forks: a run that begins with another's checkpoint, and goes on as that would have, or as its changes ask."""

import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, DamagedCheckpoint
from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind, list_committed, read_manifest, record_rewind, skipped_ranges
from checkpoints.verify import COPIED_ATTEMPT, verify_all
from data_service.stream.stream import Stream
from launcher.errors import RunChanged, RunError
from launcher.observe.inspect.show import find_sample
from launcher.runtime.rank.data import checksum
from launcher.runtime.recipe.phase_parts import PhaseMixture
from launcher.runtime.run.fork import ForkResult, fork
from launcher.runtime.run.record import RECORD_FILE, Run, open_run
from launcher.runtime.run.step_table import Record
from launcher.runtime.run.streams import SPIKES_KEY, sample_positions, stream_spec
from tests.support.checks.command import maskfleet
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
STEP = 9  # in the second phase, which begins at step 8
FIRST = "{steps: 8, length: 32, batch: {sequences: 12}}"


@pytest.fixture(scope="module")
def source(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of 14 steps that has ended, with checkpoints of steps 9, 12 and 14."""
    run = small_runs.new_run(inputs, str(tmp_path_factory.mktemp("source") / "run"))
    # On a busy machine a save that is due while the one before is under way is left out; that of a stop is not.
    for last in (9, 12):
        finish(run, 1, stop_at=last)
    return finish(run, 1)


def make(
    source: str,
    uri: Path,
    *settings: str,
    step: int | None = STEP,
    keep_position: bool = False,
    decay: int | None = None,
) -> ForkResult:
    run = open_run(source)
    return fork(run, str(uri), step, settings, now=NOW, keep_position=keep_position, decay=decay)


def steps(uri: str) -> Sequence[Record]:
    return small_runs.history(uri).steps


def test_without_changes_it_goes_on_as_the_other_run_did(source: str, tmp_path: Path) -> None:
    """Even where the other run is gone."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    forked = make(str(copy), tmp_path / "fork")
    shutil.rmtree(copy)
    assert (forked.step, forked.changes, forked.restarted) == (STEP, (), ())
    uri = forked.run.uri
    finish(uri, 1)
    for what in ("step", "loss", "lr", "samples", "digest"):
        assert [record[what] for record in steps(uri)] == [record[what] for record in steps(source)[STEP:]]
    assert small_runs.final_state(uri) == small_runs.final_state(source)
    events = small_runs.history(uri).events
    assert [event["kind"] for event in events[:2]] == ["fork", "resume"]
    assert (events[0]["attempt"], events[0]["attempt_of"], events[0]["step"]) == (0, 1, STEP)
    assert "start" not in [event["kind"] for event in events]


def test_other_data_begins_anew_and_everything_else_goes_on(source: str, tmp_path: Path) -> None:
    """Stopped on the way, it still is one run: the same steps, the same data."""
    forked = make(source, tmp_path / "fork", "seed=5")
    assert forked.restarted == ("seed",)
    uri = forked.run.uri
    finish(uri, 1, stop_at=11)
    finish(uri, 1)
    assert [record["step"] for record in steps(uri)] == list(range(STEP, 14))
    assert [record["lr"] for record in steps(uri)] == [record["lr"] for record in steps(source)[STEP:]]
    assert [record["samples"][0] for record in steps(uri)[:3]] == [[0, 0, 8], [0, 8, 16], [0, 16, 20]]
    assert small_runs.final_state(uri) != small_runs.final_state(source)
    assert find_sample(forked.run, STEP, 0).sample == 0
    with pytest.raises(RunError, match=r"\bdata\b.*\bstep 8\b"):
        find_sample(forked.run, 8, 0)


@pytest.mark.parametrize(
    ("setting", "restarted"),
    [
        (f"phases=[{FIRST}, {{steps: 60, length: 64, batch: {{sequences: 8}}}}]", ()),
        (f"phases=[{FIRST}, {{steps: 6, length: 64, batch: {{sequences: 4}}}}]", ("phases",)),
        (f"phases=[{FIRST}, {{steps: 6, length: 32, batch: {{sequences: 8}}}}]", ("phases",)),
        ("phases=[{steps: 14, length: 32, batch: {sequences: 12}}]", ("phases",)),
        (f"phases=[{FIRST}, {{steps: 1, length: 64, batch: {{sequences: 8}}}}, {FIRST}]", ()),
        ("shuffle=uniform", ("shuffle",)),
        ("model.dropout=0.0", ()),
    ],
)
def test_the_data_goes_on_where_the_steps_so_far_would_have_been_the_same(
    source: str, tmp_path: Path, setting: str, restarted: tuple[str, ...]
) -> None:
    assert open_run(source).recipe.shuffle == "spread"
    forked = make(source, tmp_path / "fork", setting)
    assert forked.restarted == restarted
    assert open_run(forked.run.uri).record.data_begins == (STEP if restarted else 0)
    shown = find_sample(forked.run, STEP, 0)
    assert (shown.epoch, shown.sample) == (0, 0) if restarted else shown.epoch > 0
    kept = make(source, tmp_path / "kept", setting, keep_position=True)
    assert (kept.restarted, kept.run.record.data_begins) == ((), 0)


def test_moments_of_another_optimizer_are_refused_unless_they_are_the_same(source: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\bstep \d+ .*\boptimizer\b") as refused:
        make(source, tmp_path / "muon", "optimizer={muon: {lr: 1.0e-3}}")
    assert f"--set start={source}" in refused.value.remedy
    assert not (tmp_path / "muon" / RECORD_FILE).exists()
    make(source, tmp_path / "stable", "optimizer={stableadamw: {lr: 1.0e-3}}")


def test_its_record_names_all_it_came_from(source: str, tmp_path: Path) -> None:
    first = make(source, tmp_path / "one", "seed=5", step=12)
    longer = f"phases=[{FIRST}, {{steps: 60, length: 64, batch: {{sequences: 8}}}}]"
    second = make(first.run.uri, tmp_path / "two", longer, "optimizer.adamw.lr=1e-4", step=None)
    record = open_run(second.run.uri).record
    assert [(origin.run, origin.step) for origin in record.origins] == [
        (open_run(source).store.uri, 12),
        (first.run.uri, 12),
    ]
    assert record.origins[0].changes == ("- seed: 1 -> 5",)
    assert any("optimizer.adamw.lr" in line for line in record.origins[1].changes)
    assert record.data_begins == 12, "what was so in the run between"
    assert record.fingerprint != first.run.record.fingerprint


def test_what_the_run_leaves_out_the_fork_leaves_out(source: str, tmp_path: Path) -> None:
    """The run has gone back to step 9 in its third start, past some data, which means nothing to another seed's."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    store = open_run(str(copy)).store
    left_out = ((1, 4, 8, 16),)
    back = Rewind(attempt=3, to=CheckpointName(1, STEP), began=11, reached=14, cause="a spike", skips=left_out)
    record_rewind(store, back, Attempt(store, 3))
    for name, settings, expected in (("same", (), left_out), ("other", ("seed=5",), ())):
        forked = make(str(copy), tmp_path / name, *settings, step=None)
        assert forked.step == STEP
        manifest = read_manifest(forked.run.store, CheckpointName(COPIED_ATTEMPT, STEP))
        assert skipped_ranges(manifest, []) == expected
        assert (SPIKES_KEY in manifest.state) == (name == "same"), "losses on other data are no measure"
        again = make(forked.run.uri, tmp_path / f"{name}-again", "seed=6", step=None)
        assert skipped_ranges(read_manifest(again.run.store, CheckpointName(COPIED_ATTEMPT, STEP)), []) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.layers=3",), r"model\.layers: 2 -> 3"),
        (("objective.mlm.unit=span", "objective.sbo={weight: 1}"), "other parameters"),
    ],
)
def test_another_model_is_refused(source: str, tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RunChanged, match=message) as caught:
        make(source, tmp_path / "fork", *settings)
    assert f"start={source}" in caught.value.remedy
    assert not (tmp_path / "fork").exists()


def test_a_fork_has_something_to_train(source: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\bcheckpoint\b.*\bstep 4\b"):
        make(source, tmp_path / "fork", step=4)
    with pytest.raises(RunError, match=r"\bstep 14\b.*\bphases\b.*\bstep 14\b"):
        make(source, tmp_path / "fork", step=None)
    assert not (tmp_path / "fork").exists()
    with pytest.raises(RunError, match=r"\ba run\b"):  # which is never overwritten
        make(source, Path(source))


def test_a_stable_run_is_ended_by_a_decay_on_the_data_that_it_would_have_read(source: str, tmp_path: Path) -> None:
    stable = make(source, tmp_path / "stable", "schedule={warmup: 3, decay: constant}").run.uri
    ended = make(stable, tmp_path / "ended", decay=4, step=None)
    assert (ended.step, ended.restarted) == (STEP, ())
    uri = finish(ended.run.uri, 1)
    adamw = open_run(source).recipe.optimizer.adamw
    assert adamw is not None
    assert [record["lr"] for record in steps(uri)] == [adamw.lr * (1 - (n / 4) ** 0.5) for n in range(4)]
    for what in ("step", "samples", "digest"):
        assert [record[what] for record in steps(uri)] == [record[what] for record in steps(source)[STEP : STEP + 4]]
    with pytest.raises(RunError, match=r"\bdecaying\b.*\bstep 9\b"):
        make(source, tmp_path / "not", decay=4)


def test_forks_of_a_phase_with_a_mixture_go_on_in_its_data_however_long_they_are(source: str, tmp_path: Path) -> None:
    """The plan of a mixture depends on the length of its phase: a fork keeps the one that was made."""
    mixed = f"phases=[{FIRST}, {{steps: 30, length: 64, batch: {{sequences: 8}}, mixture: {{weights: {{text: 1}}}}}}]"
    stable = make(source, tmp_path / "stable", mixed, "schedule={warmup: 3, decay: constant}")
    assert stable.restarted == ("phases",)
    uri = finish(stable.run.uri, 1, stop_at=12)
    ended = make(uri, tmp_path / "ended", decay=4, step=None)
    longer = make(uri, tmp_path / "longer", "phases.1.steps=50", step=None)
    other = make(uri, tmp_path / "other", "phases.1.steps=50", "phases.1.mixture.steps=50", step=None)
    assert (ended.restarted, longer.restarted, other.restarted) == ((), (), ("phases",))
    assert [fork.run.recipe.phases[1].mixture for fork in (ended, longer)] == [
        PhaseMixture(weights={"text": 1}, steps=30)
    ] * 2
    asked = [digest(stable.run, step) for step in range(12, 16)]
    assert [digest(longer.run, step) for step in range(12, 16)] == asked
    assert digest(other.run, 12) != asked[0]
    assert [record["digest"] for record in steps(finish(ended.run.uri, 1))] == asked


def digest(run: Run, step: int) -> int:
    """Of what a step reads."""
    streams = [Stream(stream_spec(run, run.tokenizer(), phase)) for phase in range(len(run.recipe.phases))]
    taken = sample_positions(run, streams, ()).ranges_of_step(step)
    return sum(checksum(streams[r.phase].read(r.epoch, r.start, r.stop)) for r in taken)


def test_an_interrupted_fork_can_be_repeated(source: str, tmp_path: Path) -> None:
    forked = make(source, tmp_path / "fork")
    store = forked.run.store
    for key in (RECORD_FILE, CheckpointName(COPIED_ATTEMPT, STEP).manifest_key):
        store.delete(key)
        assert make(source, tmp_path / "fork").run.record == forked.run.record
        store.delete(RECORD_FILE)
    with pytest.raises(RunError, match=r"\banother\b.*\bcheckpoint\b"):
        make(source, tmp_path / "fork", step=12)
    make(source, tmp_path / "fork")
    assert list_committed(store) == [CheckpointName(COPIED_ATTEMPT, STEP)]
    assert [report.problems for report in verify_all(store)] == [()]


def test_a_damaged_checkpoint_makes_no_run(source: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    weights = next((copy / "checkpoints").glob(f"step-{STEP:08d}-*/rank-00000.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"\bhash\b.* \d+ to \d+"):
        make(str(copy), tmp_path / "fork")
    with pytest.raises(RunError, match=r"\bmaskfleet init\b"):
        open_run(str(tmp_path / "fork"))


def test_the_commands_say_where_it_is_from(source: str, tmp_path: Path) -> None:
    new, page = str(tmp_path / "fork"), tmp_path / "report.html"
    made = maskfleet("runs", "fork", source, new, "--step", str(STEP), "--set", "seed=5")
    assert "from step 9" in made
    assert "- seed: 1 -> 5" in made
    assert "starts over (seed)" in made
    shown = maskfleet("runs", "status", new)
    assert "never" in shown
    assert "step 9 of 14" in shown
    assert re.search(rf" {open_run(source).store.uri} at step 9, .*\bseed: 1 -> 5\b", shown)
    maskfleet("report", new, "--out", str(page), "--no-baselines")
    assert "forked" in page.read_text()
