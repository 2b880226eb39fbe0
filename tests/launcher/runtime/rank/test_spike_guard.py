"""One rank's judge of losses, on made-up steps: what it asks of the engine, and what it puts on record."""

import math
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, claim
from checkpoints.errors import CheckpointError
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import list_committed, read_manifest, read_rewinds
from data_service.stream.positions import PhaseBatches, StepSampleRanges
from encoder_core.train.engine import Update
from encoder_core.train.exchange import RankGroup, StepSignals
from encoder_core.train.metrics import StepReport
from encoder_core.train.state import TrainState
from launcher.errors import RunError
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.spike_guard import Rewound, SpikeGuard
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import RunLog
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import read_skipped_data
from tests.support.ranks.checkpointers import Silent
from tests.support.ranks.checkpointing import commit_steps
from tests.support.runs.small_runs import new_run

SPIKES = "spikes={window: 4, threshold: 5.0, patience: 3, most_rewinds: 1, outlier: 20.0}"
PHASES = [PhaseBatches.from_samples(50, 10, 95), PhaseBatches.from_samples(50, 8, 60)]
COUNTS = {"mlm": 100.0}


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Run:
    return open_run(new_run(inputs, str(tmp_path / "run"), SPIKES))


def guard_of(run: Run, attempt: Attempt, resumed: CheckpointManifest | None = None) -> SpikeGuard:
    lost = read_skipped_data(run, resumed, SingleRank())
    journal = RankJournal(Silent(), StartupClock(), RunLog(run.store, attempt.number, 1e9))
    positions = StepSampleRanges(PHASES, lost.ranges)
    return SpikeGuard(run, attempt, RankGroup(0, 1, None), SingleRank(), journal, positions, resumed, lost)


def sums(loss: float) -> dict[str, float]:
    return {"mlm_loss": 100 * loss, "mlm_weighted": 100 * loss, "mlm_targets": 100.0}


def make_step(guard: SpikeGuard, step: int, loss: float, norm: float = 1.0) -> bool:
    """As the loop does it, with an engine that follows the limit. Whether the update was made."""
    limit = guard.gradient_norm_limit(step, "all", sums(loss))
    applied = math.isfinite(norm) and norm <= limit
    signals = StepSignals(False, False, False, True, False, 0.0, 1000, 0, COUNTS)
    guard.receive_report(
        StepReport(TrainState(step=step), (), signals, sums(loss), 1e-3, {"all": Update(applied, norm)}, 0.1, ())
    )
    return applied


def calm(guard: SpikeGuard, start: int, stop: int) -> None:
    for step in range(start, stop):
        assert make_step(guard, step, 3.0 + 0.01 * (step % 3))


def go_bad(guard: SpikeGuard, start: int, stop: int) -> None:
    for step in range(start, stop):
        make_step(guard, step, math.nan, math.nan)


def test_outliers_make_no_update_by_loss_or_by_gradient(run: Run) -> None:
    guard = guard_of(run, claim(run.store))
    assert make_step(guard, 0, 90.0, 90.0), "there is no measure yet"
    calm(guard, 1, 5)
    assert not make_step(guard, 5, 9.0)
    assert not make_step(guard, 6, 3.0, norm=50.0)
    assert make_step(guard, 7, 3.0)


def test_it_goes_back_on_record(run: Run) -> None:
    attempt = claim(run.store)
    guard = guard_of(run, attempt)
    calm(guard, 0, 12)
    commit_steps(run.store, attempt, 4, 8, 10)
    for step in (12, 13):
        make_step(guard, step, math.nan, math.nan)
    with pytest.raises(Rewound, match=r"\bfinite: .*\bstep 15 .*\bstep 8\b"):
        make_step(guard, 14, math.nan, math.nan)
    (rewind,) = read_rewinds(run.store)
    assert (rewind.attempt, rewind.to, rewind.began, rewind.reached) == (1, CheckpointName(1, 8), 12, 15)
    assert rewind.skips == ((0, 0, 80, 95), (0, 1, 0, 55)), "steps 8 to 15, across the end of an epoch"
    assert list_committed(run.store) == [CheckpointName(1, 8), CheckpointName(1, 4)]
    guard.journal.close()
    (event,) = (event for event in read_history(run.store).events if event["kind"] == "rewind")
    assert (event["step"], event["to"], event["samples"]) == (15, 8, 70)

    attempt.record_end(0.0)
    again = guard_of(run, claim(run.store), read_manifest(run.store, CheckpointName(1, 8)))
    assert [(r.start, r.stop) for r in again.positions.ranges_of_step(8)] == [(55, 65)], "what follows moves up"
    assert again.state()["skips"] == [[0, 0, 80, 95], [0, 1, 0, 55]]


def test_the_second_time_in_a_row_it_ends_but_goes_back_all_the_same(run: Run) -> None:
    commit_steps(run.store, claim(run.store), 4)
    first = read_manifest(run.store, CheckpointName(1, 4))
    for number, reason in ((1, Rewound), (2, RunError)):
        attempt = Attempt(run.store, number) if number == 1 else claim(run.store)
        guard = guard_of(run, attempt, first)
        calm(guard, 4, 9)
        with pytest.raises(reason):
            go_bad(guard, 9, 12)
        attempt.record_end(0.0)
    assert [rewind.to for rewind in read_rewinds(run.store)] == [CheckpointName(1, 4)] * 2
    assert read_rewinds(run.store)[1].skips == ((0, 0, 40, 95), (0, 1, 0, 25), (0, 1, 25, 95), (0, 2, 0, 10))


def test_with_nothing_to_go_back_to_it_ends(run: Run) -> None:
    guard = guard_of(run, claim(run.store))
    with pytest.raises(RunError, match=r"\bcheckpoint\b.*\b3\b"):
        go_bad(guard, 0, 3)
    assert read_rewinds(run.store) == []


def test_a_zombie_goes_back_for_nobody(run: Run) -> None:
    attempt = claim(run.store)
    commit_steps(run.store, attempt, 4)
    guard = guard_of(run, attempt)
    calm(guard, 0, 8)
    attempt.record_end(0.0)
    claim(run.store)
    with pytest.raises(CheckpointError, match=r"\battempt 2\b"):
        go_bad(guard, 8, 11)
    assert read_rewinds(run.store) == []


def test_the_way_back_stays_where_it_was_while_a_spike_lasts(run: Run) -> None:
    guard = guard_of(run, claim(run.store))
    calm(guard, 0, 12)
    assert guard.latest_rewind_step(12) == 9
    make_step(guard, 12, math.nan, math.nan)
    make_step(guard, 13, math.nan, math.nan)
    assert guard.latest_rewind_step(14) == 9


def test_checkpoints_of_other_lines_of_the_run_do_not_count(run: Run) -> None:
    """The first attempt got to step 8, but its checkpoint was damaged; the second went on from step 4."""
    first = claim(run.store)
    commit_steps(run.store, first, 4, 8)
    first.record_end(0.0)
    guard = guard_of(run, claim(run.store), read_manifest(run.store, CheckpointName(1, 4)))
    calm(guard, 4, 12)
    with pytest.raises(Rewound, match="to step 4"):
        go_bad(guard, 12, 15)
