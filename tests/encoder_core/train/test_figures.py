"""What a step and an evaluation report, from sums; and the counters of a run's state."""

from dataclasses import replace

from encoder_core.train.engine import Update
from encoder_core.train.exchange import StepSignals
from encoder_core.train.metrics import CopyReport, StepReport, figures_from_sums
from encoder_core.train.state import TrainState

ELECTRA = {
    "mlm_loss": 20.0,
    "mlm_weighted": 20.0,
    "mlm_targets": 10.0,
    "mlm_correct": 4.0,
    "rtd_loss": 30.0,
    "rtd_weighted": 1500.0,
    "rtd_targets": 100.0,
    "rtd_correct": 95.0,
    "rtd_replaced": 8.0,
    "rtd_flagged": 5.0,
    "rtd_found": 4.0,
}


def test_terms_are_weighted_and_every_figure_named() -> None:
    assert figures_from_sums(ELECTRA) == {
        "loss": 2.0 + 50 * 0.3,
        "mlm_loss": 2.0,
        "mlm_accuracy": 0.4,
        "rtd_loss": 0.3,
        "rtd_accuracy": 0.95,
        "rtd_precision": 0.8,
        "rtd_recall": 0.5,
        "rtd_replaced": 0.08,
    }


def test_nothing_flagged_and_nothing_to_find_is_zero() -> None:
    figures = figures_from_sums(dict.fromkeys(ELECTRA, 0.0))
    assert set(figures.values()) == {0.0}


def report(updates: dict[str, Update]) -> StepReport:
    signals = StepSignals(
        stop=False,
        save=False,
        saved=False,
        fits=True,
        keep=False,
        wait=0.5,
        tokens=100,
        digest=7,
        counts={"mlm": 10.0, "rtd": 100.0},
    )
    return StepReport(TrainState(step=3), ((0, 0, 8),), signals, ELECTRA, 1e-4, updates, 2.0)


def test_one_update_has_one_norm() -> None:
    record = report({"all": Update(True, 1.5)}).to_record()
    assert {name: value for name, value in record.items() if "norm" in name} == {"grad_norm": 1.5}
    assert record["loss"] == 17.0
    assert not record["skipped"]


def test_two_updates_report_a_norm_each_and_that_of_all_gradients() -> None:
    record = report({"generator": Update(True, 3.0), "discriminator": Update(False, 4.0)}).to_record()
    assert record["generator_grad_norm"] == 3.0
    assert record["discriminator_grad_norm"] == 4.0
    assert record["grad_norm"] == 5.0
    assert record["skipped"]


def test_copies_in_memory_are_recorded_only_by_runs_that_make_them() -> None:
    plain = report({"all": Update(True, 1.5)})
    assert "copy_seconds" not in plain.to_record()
    for copied in (CopyReport(), CopyReport(0.25, 4096)):
        record = replace(plain, copied=copied).to_record()
        assert (record["copy_seconds"], record["copy_bytes"]) == (copied.seconds, copied.bytes)


def test_updates_are_counted_by_turn() -> None:
    state = TrainState()
    assert state.next_update_number("generator") == 1
    state = state.after_step(applied={"generator": True, "discriminator": False}, tokens=5)
    state = state.after_step(applied={"generator": True, "discriminator": True}, tokens=5)
    assert state.updates == {"generator": 2, "discriminator": 1}
    assert (state.step, state.skipped, state.tokens) == (2, 1, 10)
    assert state.next_update_number("discriminator") == 2
    assert TrainState.from_json(state.to_json()) == state


def test_a_state_that_counted_one_turn_is_read() -> None:
    state = TrainState.from_json({"step": 9, "updates": 8, "skipped": 1, "tokens": 100})
    assert state == TrainState(step=9, updates={"all": 8}, skipped=1, tokens=100)
