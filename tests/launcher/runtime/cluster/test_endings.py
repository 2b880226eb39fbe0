"""Every end has one of four codes: which errors are mistakes, and what becomes of everything else."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from checkpoints.errors import CheckpointError, RunIsActive, SaveFailed, Superseded
from data_service.errors import CorpusError, EnvironmentUnusable, RayLost, TokenizerError
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    KeyMissing,
    OutOfSpace,
    StoreUnavailable,
)
from encoder_core.errors import TrainingError
from launcher.app.companions import TRAINING_COMPANIONS
from launcher.errors import RecipeError, RunChanged, RunError, TransientRunError
from launcher.exit_codes import FINISHED, MISTAKE, REPEAT, STOPPED, exit_code_for
from launcher.runtime.cluster import train as training
from launcher.runtime.cluster.display import ProgressDisplay
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.cluster.train import RunOutcome, supervise
from launcher.runtime.policies.failures import UNSAVED_FAILURE_LIMIT
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import Run, open_run
from tests.support.clusters.control import Display

MISTAKES: tuple[Any, ...] = (
    RecipeError, RunError, RunChanged, CorpusError, TokenizerError, TrainingError, CheckpointError, RunIsActive,
    BadUri, AccessDenied, KeyMissing, EnvironmentUnusable,
)  # fmt: skip
PASSING: tuple[Any, ...] = (
    StoreUnavailable, CredentialsExpired, CredentialsMissing, OutOfSpace, Superseded, TransientRunError, RayLost,
)  # fmt: skip


def test_mistakes_are_final_and_what_may_pass_is_tried_again_as_is_everything_else() -> None:
    assert {kind: exit_code_for(kind("what", remedy="do")) for kind in (*MISTAKES, *PASSING)} == {
        **dict.fromkeys(MISTAKES, MISTAKE),
        **dict.fromkeys(PASSING, REPEAT),
    }
    others = (SaveFailed(9, 6, "no answer"), KeyError("x"), OSError(5))
    assert {exit_code_for(error) for error in others} == {REPEAT}


def ended(run: str, monkeypatch: pytest.MonkeyPatch, end: Any) -> tuple[int, str, list[dict[str, Any]]]:
    """What a start makes of an end of `supervise`: its code, what is shown, what is on record."""

    def instead(*_: object, **__: object) -> RunOutcome:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(training, "supervise", instead)
    shown: list[str] = []
    monkeypatch.setattr(ProgressDisplay, "note", lambda self, text: shown.append(text))
    outcome = training.train(open_run(run), Console(), TRAINING_COMPANIONS)
    return outcome.code, "\n".join(shown), list(read_history(open_run(run).store).events)


@pytest.mark.parametrize("code", [FINISHED, STOPPED, REPEAT])
def test_an_orderly_end_is_an_event_with_the_step(code: int, fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, (event,) = ended(fresh_run, monkeypatch, RunOutcome(code, 7, "SIGTERM" if code else None))
    assert (found, event["kind"], event["step"]) == (code, "stop" if code else "end", 7)


@pytest.mark.parametrize("error", [KeyError("x"), ConnectionError("GCS"), RuntimeError("a\nb"), AssertionError()])
def test_a_failure_of_ray_or_of_ours_is_a_line(
    error: Exception, fresh_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, shown, (event,) = ended(fresh_run, monkeypatch, error)
    assert code == REPEAT
    assert re.match(rf".*: {type(error).__name__}\b", shown)
    assert "Traceback" not in shown
    assert (event["kind"], "Traceback" in event["trace"]) == ("failed", True)


def test_a_mistake_is_raised_for_the_command_line(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorpusError):
        ended(fresh_run, monkeypatch, CorpusError("damaged", remedy="mend"))


def test_an_outage_does_not_mask_the_reason(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the closing record cannot be written either."""

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable.for_uri(fresh_run, "no answer")

    monkeypatch.setattr("launcher.runtime.cluster.operator_log.record_operator_event", away)
    monkeypatch.setattr(training, "_LOG_CLOSE_TIMEOUT_S", 0.1)
    code, shown, events = ended(fresh_run, monkeypatch, StoreUnavailable.for_uri("s3://b/k", "refused"))
    assert (code, events) == (REPEAT, [])
    assert " s3://b/k: refused" in shown


def test_no_cluster_at_the_address(fresh_run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is said at once, nothing is claimed, and a stop is heard meanwhile."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("launcher.runtime.cluster.ray_session._CONNECT_S", 0.5)
    notes: list[str] = []

    with pytest.raises(TransientRunError, match="RAY_ADDRESS="):
        supervised(open_run(fresh_run), notes)
    assert "RAY_ADDRESS=127.0.0.1:1 " in notes[0]
    assert not list(open_run(fresh_run).store.list("attempts/"))


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("memory", "passes"), [("900GiB", False), (None, True)])
def test_a_store_that_leaves_no_memory_is_named_with_the_key(
    fresh_run: str, monkeypatch: pytest.MonkeyPatch, memory: str | None, passes: bool
) -> None:
    """By Ray itself; what is too much for the whole machine does not pass by waiting."""
    run = open_run(fresh_run)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if memory is None:  # half of the machine, where everything else takes more than the other half
        memory = str(psutil.virtual_memory().total // 4)
        monkeypatch.setattr("ray._private.utils.estimate_available_memory", lambda: 1 << 30)
    run = replace(run, recipe=with_assignments(run.recipe, (f"data_service.memory={memory}",)), stored=run)
    with pytest.raises(RunError) as caught:
        supervised(run, [])
    assert isinstance(caught.value, TransientRunError) == passes
    assert "data_service.memory=" in caught.value.remedy


def test_starts_that_fail_before_the_first_step_end_the_run(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails them: 75 does not go round for ever."""

    def connect(**local: object) -> None:
        raise OSError(f"no Ray, attempt {len(codes)}")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("launcher.runtime.cluster.ray_session.connect_ray", connect)
    codes: list[int] = []
    for _ in range(UNSAVED_FAILURE_LIMIT):
        with pytest.raises((OSError, RunError)) as caught:
            supervised(open_run(fresh_run), [])
        codes.append(exit_code_for(caught.value))
    assert codes == [REPEAT] * (UNSAVED_FAILURE_LIMIT - 1) + [MISTAKE]
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(OSError):  # noqa: PT011  # who starts it again has mended something
        supervised(open_run(fresh_run), [])


def supervised(run: Run, notes: list[str]) -> None:
    """Start `run` as the command does. `notes`: what the operator is shown."""
    display: Any = Display()
    display.notes = notes
    stopping, log = StopRequests(display.note), OperatorLog(run.store, display.note)
    supervise(run, display, log, stopping, companions=TRAINING_COMPANIONS)
