"""A run of next-token prediction, masked tokens, and next tokens again: what each step trains, whatever kills it and
wherever; and that no step shows a token what it predicts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpoints.hf.export import MODEL_CARD
from checkpoints.listing import list_committed
from data_service.samples.masking import MlmMasking
from data_service.samples.next_token import NextToken
from launcher.after.export.export import export_run
from launcher.runtime.run.record import open_run
from launcher.runtime.run.streams import heldout_specs, stream_spec
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 14
SETTINGS = (
    "objective.clm={}",
    "phases=[{steps: 5, length: 32, batch: {sequences: 12}, objective: clm}, "
    "{steps: 5, length: 48, batch: {sequences: 8}, objective: mlm}, "
    "{steps: 4, length: 32, batch: {sequences: 12}, objective: clm}]",
    "checkpoint={every: {steps: 2}, keep_last: 8}",
    "evaluation={every: {steps: 5}, samples: 20}",
    "weight_check={every: 1}",
)


def new_run(folder: Path, name: str, *settings: str) -> str:
    return small_runs.new_run(folder, name, *SETTINGS, *settings)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(new_run(folder, "undisturbed"), 2)


def trained(record: Mapping[str, object]) -> set[str]:
    """The terms of which a record has a loss."""
    return {name.removesuffix("_loss") for name in record if name.endswith("_loss")}


@pytest.mark.long
def test_each_phase_trains_and_measures_its_own_objective(undisturbed: str) -> None:
    run, found = open_run(undisturbed), small_runs.history(undisturbed)
    assert [trained(record) for record in found.steps] == [{"clm"}] * 5 + [{"mlm"}] * 5 + [{"clm"}] * 4
    assert [(record["step"], trained(record)) for record in found.evaluations] == [
        (0, {"clm"}),
        (5, {"clm"}),
        (10, {"mlm"}),
        (14, {"clm"}),
    ]
    maskings = [stream_spec(run, run.tokenizer(), phase).masking for phase in range(3)]
    assert [type(masking) for masking in maskings] == [NextToken, MlmMasking, NextToken]
    first, second, third = heldout_specs(run, run.tokenizer())
    assert first == third
    assert first.model_copy(update={"masking": second.masking}) == second


@pytest.mark.long
@pytest.mark.parametrize("zero", range(4))
def test_killed_around_every_border_at_every_stage(folder: Path, zero: int) -> None:
    """At each border, one step before and one behind it."""
    whole = finish(new_run(folder, f"whole-{zero}", f"zero={zero}"), 2)
    run = new_run(folder, f"hunted-{zero}", f"zero={zero}")
    for step in (4, 5, 6, 9, 10, 11):
        assert KILLED in run_group(run, 2, kill={step % 2: step}).codes
    finish(run, 2)
    small_runs.ensure_same(run, whole, STEPS)


@pytest.mark.long
def test_an_export_says_whether_it_saw_later_tokens_last(undisturbed: str, tmp_path: Path) -> None:
    run = open_run(undisturbed)
    for step in [mark.step for mark in list_committed(run.store)]:
        export_run(run, step, str(tmp_path / str(step)))
        card = (tmp_path / str(step) / MODEL_CARD).read_text("utf-8")
        assert ("`clm`" in card) == (not 5 < step <= 10), step
        assert ("fill-mask" in card) == (5 < step <= 10), step
