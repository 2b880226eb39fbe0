"""What is said of a run, from what its starts have left in the store."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from checkpoints.attempt import Attempt, Owner, claim, end_newest_attempt
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName
from checkpoints.save import Saver
from data_service.store.base import Store
from encoder_core.train.zero_state import Fragment
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.observe.inspect.report.figures import Interruption
from launcher.observe.inspect.status import RunStatus, UnreadableRun, read_status, read_statuses, status_lines
from launcher.runtime.run.log import RunLog, evaluation_record, record_operator_event
from launcher.runtime.run.outline import open_outline, runs_at
from launcher.runtime.run.record import open_run
from tests.support.runs.small_runs import new_run
from tests.support.stores.faulty import silent_for

WAIT_S = 30.0
NOW = 1_700_000_000.0
NODE = Owner(host="node7", processes="another machine", pid=12, started=6_033_449, claimed=NOW)


def begin(store: Store, now: float, owner: Owner = NODE) -> tuple[Attempt, RunLog]:
    attempt = claim(store, owner=owner, clock=lambda: now)
    attempt.write_heartbeat(now)
    return attempt, RunLog(store, attempt.number, 1000.0)


def train(journal: RunLog, first: int, stop: int, seconds: float = 2.0) -> None:
    for step in range(first, stop):
        figures = {"loss": 9.0 - step / 10, "tokens": 1000, "seconds": seconds, "data_wait": 0.0}
        journal.add_metrics({"kind": "step", "step": step, "skipped": False, "samples": [], **figures})
    assert journal.flush(WAIT_S)


def save(attempt: Attempt, step: int, now: float, begun_at: Saver | None = None) -> Saver:
    saver = begun_at or Saver(attempt.store, attempt, SingleRank(), clock=lambda: now)
    tensors = {kind: torch.zeros(4) for kind in ("master", "exp_avg", "exp_avg_sq")}
    saver.begin(step, [Fragment("w", 0, tensors)], {"w": (4,)}, {"step": step, "tokens": 1000 * step})
    saver.wait_for_all(lambda sent: None)
    saver.commit()
    return saver


@pytest.fixture
def run(fresh_run: str) -> str:
    """14 steps are asked of it."""
    return fresh_run


def said(uri: str, now: float) -> tuple[RunStatus, str]:
    found = read_status(open_outline(uri), now)
    return found, "\n".join(status_lines(found, now))


def test_a_run_that_was_never_started(run: str) -> None:
    found, text = said(run, NOW)
    assert (found.state, found.step, found.total_steps, found.checkpoint) == ("never started", 0, 14, None)
    assert "never" in text
    assert " none " in text


def test_a_run_that_runs(run: str) -> None:
    store = open_run(run).store
    attempt, journal = begin(store, NOW)
    journal.event("start", NOW, step=0)
    train(journal, 0, 9)
    journal.add_metrics(evaluation_record(7, {"loss": 4.0, "mlm_loss": 4.0, "mlm_accuracy": 0.2}))
    assert journal.flush(WAIT_S)
    save(attempt, 6, NOW + 20)
    attempt.write_heartbeat(NOW + 40)
    silent_for(run, 10)
    found, text = said(run, NOW + 50)
    assert (found.state, found.host, found.pid, found.attempt) == ("running", "node7", 12, 1)
    assert found.since == NOW
    assert found.heard == pytest.approx(NOW + 40, abs=2)
    assert (found.step, found.tokens) == (9, 9000)
    assert found.loss == pytest.approx(8.7126, abs=1e-4)  # the newest is 8.2; a running mean, as in the log
    assert (found.heldout, found.evaluated) == (4.0, 7)
    assert (found.step_seconds, found.tokens_per_second, found.eta_seconds) == (2.0, 500.0, 10.0)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.checkpoint.committed) == (6, NOW + 20)
    assert found.interruptions == ()
    for part in ("for 50.0s on node7, process 12", "heard of 10", "step 9 of 14 (64.3%), 9k tokens", "8.713"):
        assert part in text
    for part in (
        "held out after step 7: mlm 4.000 (perplexity 54.60)",
        "500 tokens/s",
        "10.0s to go",
        "step 6, 30.0s ago",
    ):
        assert part in text


def test_the_newest_rows_of_a_microbatch_are_shown_where_memory_decides(run: str) -> None:
    _, journal = begin(open_run(run).store, NOW)
    for rows in ([64, 16], [32, 16]):
        journal.event("microbatch", NOW, step=3, rows=rows, why=f"of {rows[0]}", room=1 << 30, device="GPU")
    journal.flush()
    found, text = said(run, NOW)
    assert (found.microbatch, found.microbatch_why) == ((32, 16), "of 32")
    assert "microbatch  32, 16 rows: of 32" in text


def test_terms_are_shown_by_name(run: str) -> None:
    """Of ELECTRA: the perplexity is the generator's, and the weighted sum is no loss of anything."""
    _, journal = begin(open_run(run).store, NOW)
    terms = {"loss": 19.01, "mlm_loss": 4.4673, "rtd_loss": 0.291}
    journal.add_metrics(
        {"kind": "step", "step": 0, "skipped": False, "tokens": 9, "seconds": 1.0, "data_wait": 0, **terms}
    )
    journal.add_metrics(evaluation_record(1, terms))
    journal.flush()
    found, text = said(run, NOW)
    assert (found.terms, found.loss) == ({"mlm": 4.4673, "rtd": 0.291}, 19.01)
    after = "held out after step 1: mlm 4.467 (perplexity 87.12)  rtd 0.291"
    assert f"mlm 4.467  rtd 0.291; {after}" in text
    assert "19.01" not in text


def test_a_request_to_stop_is_shown_until_it_has_stopped(run: str) -> None:
    store = open_run(run).store
    begin(store, NOW)
    record_operator_event(store, "stop_requested", NOW - 5, by="somebody before", of=0)
    assert said(run, NOW + 1)[0].stop_requested is None
    record_operator_event(store, "stop_requested", NOW + 1, by="ann@desk", of=1)
    found, text = said(run, NOW + 2)
    assert found.stop_requested == "ann@desk"
    assert re.search(r"\bstop by ann@desk\b", text)
    record_operator_event(store, "stop", NOW + 4, step=0, reason="stop requested by ann@desk")
    end_newest_attempt(store, NODE, NOW + 4)
    found, text = said(run, NOW + 5)
    assert (found.state, found.stop_requested) == ("stopped", None)
    assert re.search(r"\bstopped: .*\bann@desk\b", text)


def test_a_run_whose_machine_is_gone(run: str) -> None:
    """Not heard of for longer than the lease. What it did not commit is counted as done still: it may come back."""
    _, journal = begin(open_run(run).store, NOW)
    journal.event("start", NOW, step=0)
    train(journal, 0, 4)
    silent_for(run, 50)
    found, text = said(run, NOW + 50)
    assert found.state == "running"
    silent_for(run, 3630)  # not an hour exactly: a folder's clock is some milliseconds behind
    found, text = said(run, NOW + 3630)
    assert (found.state, found.eta_seconds) == ("dead", None)
    assert re.search(r"\bnode7, process 12, attempt 1, .*\b1h 00m\b", text)


def test_interruptions_and_goodput(run: str) -> None:
    store = open_run(run).store
    first, journal = begin(store, NOW)
    journal.event("start", NOW, step=0)
    train(journal, 0, 8)
    save(first, 6, NOW + 12)
    journal.event("commit", NOW + 12, step=6, seconds=0.1, blocked=0.0)
    assert journal.flush(WAIT_S)
    _, journal = begin(store, NOW + 40)
    journal.event("resume", NOW + 42, step=6, attempt_of=1)
    train(journal, 6, 14)
    record_operator_event(store, "end", NOW + 60, step=14)
    end_newest_attempt(store, NODE, NOW + 60)
    found, text = said(run, NOW + 100)
    assert (found.state, found.step, found.repeated_steps) == ("finished", 14, 2)
    assert found.interruptions is not None
    (gap,) = found.interruptions
    assert (gap.attempt, gap.resumed_from, gap.downtime) == (1, 6, 30.0)
    assert found.goodput == pytest.approx(28 / 42)
    assert "killed" in text
    assert re.search(r"\bstep 6 .*\b30\.0s\b", text)
    assert "66.7%, 2 steps repeated" in text


def test_the_reason_of_a_failure_is_told_until_the_next_start(run: str) -> None:
    store = open_run(run).store
    begin(store, NOW)
    record_operator_event(store, "failed", NOW + 3, reason="the disk is full")
    end_newest_attempt(store, NODE, NOW + 3)
    assert "failed: the disk is full" in said(run, NOW + 9)[1]
    begin(store, NOW + 10)
    assert said(run, NOW + 11)[0].state == "running"
    end_newest_attempt(store, NODE, NOW + 12)
    assert said(run, NOW + 13)[0].state == "stopped", "the reason was the start's before"


def test_a_damaged_checkpoint_is_said(run: str) -> None:
    store = open_run(run).store
    attempt, _ = begin(store, NOW)
    save(attempt, 6, NOW + 1)
    store.put(CheckpointName(1, 6).manifest_key, b"{}")
    found, text = said(run, NOW + 2)
    assert found.checkpoint is None
    assert " digest" in text


def test_damaged_records_are_said_and_the_rest_is_shown(run: str) -> None:
    store = open_run(run).store
    _, journal = begin(store, NOW)
    train(journal, 0, 4)
    train(journal, 4, 8)
    store.put("metrics/a000001/00000000.jsonl", b"\0garbage\n" + store.get("metrics/a000001/00000000.jsonl"))
    found, text = said(run, NOW + 1)
    assert found.step == 8
    assert len(found.damage) == 1
    assert re.search(r"\b1 records\b", text)
    assert "a000001/00000000.jsonl, line 1: not JSON" in text


def test_the_brief_status_reads_the_newest_segments_only(run: str) -> None:
    store = open_run(run).store
    attempt, journal = begin(store, NOW)
    for step in range(14):
        train(journal, step, step + 1, seconds=1.0 if step < 10 else 3.0)
        journal.add_metrics(evaluation_record(step + 1, {"loss": 4.0, "mlm_loss": 4.0}))
        assert journal.flush(WAIT_S)
    saver = save(attempt, 6, NOW)
    save(attempt, 13, NOW, saver)
    whole, brief = (
        read_status(open_outline(run), NOW + 1),
        read_status(open_outline(run), NOW + 1, brief=True),
    )
    assert (brief.step, brief.evaluated) == (whole.step, whole.evaluated) == (14, 14)
    assert brief.loss == pytest.approx(whole.loss, rel=0.05), "a mean over the steps that were read"
    assert (whole.step_seconds, brief.step_seconds) == (1.0, 2.0), "the newest 16 segments hold 8 steps"
    assert brief.tokens == whole.tokens == 14_000
    assert brief.interruptions is None


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_exact_or_unknown_whatever_a_brief_status_reads(run: str, seed: int) -> None:
    store, draw = open_run(run).store, random.Random(seed)
    attempt, journal = begin(store, NOW)
    steps, first_in_segment = 0, list[int]()
    for _ in range(draw.randint(10, 40)):
        first_in_segment.append(steps)
        train(journal, steps, steps := steps + draw.randint(1, 3))
    saved = draw.choice([0, draw.randint(1, steps)])
    if saved:
        save(attempt, saved, NOW)
    brief = read_status(open_outline(run), NOW, brief=True)
    assert brief.step == steps
    assert brief.tokens == (1000 * steps if (first_in_segment[-16:])[0] <= saved else None)
    assert read_status(open_outline(run), NOW).tokens == 1000 * steps
    assert ("tokens," in "\n".join(status_lines(brief, NOW))) == (brief.tokens is not None)


def interruptions(found: RunStatus | UnreadableRun) -> tuple[Interruption, ...] | None:
    assert isinstance(found, RunStatus)
    return found.interruptions


@pytest.mark.long
def test_a_folder_of_runs(inputs: Path, tmp_path: Path) -> None:
    uris = [new_run(inputs, str(tmp_path / "runs" / name)) for name in ("b", "a")]
    folder = uris[0].removesuffix("/b")
    assert [found.uri for found in read_statuses([folder], NOW)] == sorted(uris)
    assert [interruptions(found) for found in read_statuses([folder], NOW)] == [None, None]
    (one,) = read_statuses([uris[0]], NOW)
    assert interruptions(one) == ()
    (one,) = read_statuses([uris[0]], NOW, brief=True)
    assert interruptions(one) is None
    record = Path(folder, "a", "run.json")
    record.write_text("{")
    damaged, well = read_statuses([folder], NOW)
    assert isinstance(damaged, UnreadableRun)
    assert (damaged.uri, well.uri) == tuple(sorted(uris))
    result = CliRunner().invoke(app, ["runs", "status", folder])
    assert result.exit_code == 1
    assert "unreadable" in result.output
    assert "never" in result.output
    assert re.search(r"\brun\.json\b.*\bdamaged\b", result.stderr)
    with pytest.raises(RunError, match=r"\bno run\b"):
        runs_at(str(tmp_path / "nowhere"))


def test_the_command_prints_text_or_json(run: str, tmp_path: Path) -> None:
    _, journal = begin(open_run(run).store, NOW)
    train(journal, 0, 2)
    silent_for(run, 100)
    result = CliRunner().invoke(app, ["runs", "status", run], catch_exceptions=False)
    assert "step 2 of 14" in result.output
    result = CliRunner().invoke(app, ["runs", "status", run, run, "--json"], catch_exceptions=False)
    first, second = map(json.loads, result.output.splitlines())
    assert first.pop("heard") == pytest.approx(second.pop("heard"), abs=2)
    assert first == second
    assert (first["state"], first["step"], first["origins"], first["goodput"]) == ("dead", 2, [], None)
    result = CliRunner().invoke(app, ["runs", "status", run, run], catch_exceptions=False)
    assert result.output.count("dead") == 2
