"""A folder and the run it was exported from are the same start, at any ZeRO stage, and on record."""

from pathlib import Path

import pytest

from launcher.after.export.export import export_run
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish, run_group
from tests.support.runs import small_runs

PHASE = "phases=[{steps: 3, length: 32, batch: {sequences: 12}}]"
QUIET = (
    *(PHASE, "model.dropout=0.0", "model.attention_dropout=0.0", "schedule.warmup=1"),
    *("checkpoint={every: {steps: 3}, keep_last: 1}", "evaluation={every: {steps: 3}, samples: 20}"),
)


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_and_its_export_start_alike(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path)
    first = small_runs.new_run(tmp_path, "first", *QUIET, "zero=2")
    finish(first, 1)
    export_run(open_run(first), None, f"{tmp_path}/exported")
    found = []
    for name, start, world, stage in (("folder", "exported", 1, 1), ("run", "first", 2, 3)):
        uri = small_runs.new_run(tmp_path, name, *QUIET, f"zero={stage}", f"start={tmp_path}/{start}")
        ended = run_group(uri, world)
        assert ended.codes == [0] * world, ended.output
        assert f"weights from {tmp_path}/{start}" in ended.output
        found.append(uri)
    from_folder, from_run = (small_runs.losses(uri) for uri in found)
    assert from_folder == pytest.approx(from_run, rel=1e-5)
    assert from_folder[0] < 0.98 * small_runs.losses(first)[0]
    events = [next(e for e in small_runs.history(uri).events if e["kind"] == "start") for uri in found]
    assert [event["fresh"] for event in events] == [[], []]
    assert events[1]["start_step"] == 3
    assert len(events[0]["start_digest"]) == 64
