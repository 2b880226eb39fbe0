"""The table of figures: what it publishes stays, and what a step records is in it."""

import pytest

from encoder_core.objectives.figures import TERM_FIGURES, TERM_LOSS
from encoder_core.train.engine import Update
from encoder_core.train.exchange import StepSignals
from encoder_core.train.metrics import CopyReport, StepReport
from encoder_core.train.state import TrainState
from launcher.runtime.cluster.display import GAUGE_DESCRIPTIONS
from launcher.runtime.run.log import evaluation_record
from launcher.runtime.run.metrics import HELD_OUT_METRICS, STEP_METRICS, THROUGHPUT, tracker_figures
from tests.support.checks.figures import UNSHOWN_FIELDS

TERMS = {"mlm_weighted": 300.0, "mlm_loss": 300.0, "mlm_correct": 30.0, "mlm_targets": 150.0}


def report(*groups: str) -> StepReport:
    signals = StepSignals(False, False, False, True, False, 0.1, 1000, 7, {"mlm": 150.0})
    updates = {group: Update(True, 3.0) for group in groups}
    return StepReport(TrainState(), (), signals, TERMS, 1e-3, updates, 0.5, copied=CopyReport(0.05, 4096))


def test_users_dashboards_find_every_figure_under_its_name() -> None:
    """Whoever renames one breaks them."""
    step = tracker_figures(report("all").to_record() | {"mfu": 0.3})
    assert step == {
        "train/loss": 2.0,
        "train/mlm_loss": 2.0,
        "train/mlm_accuracy": 0.2,
        "train/lr": 1e-3,
        "train/grad_norm": 3.0,
        "train/data_wait_share": 0.2,
        "train/mfu": 0.3,
        "train/copy_share": 0.1,
        "train/tokens_per_second": 2000.0,
    }
    evaluation = tracker_figures(evaluation_record(7, {"loss": 2.0, "mlm_loss": 2.0, "mlm_targets": 150.0}))
    assert evaluation.keys() == {"heldout/loss", "heldout/mlm_loss", "heldout/perplexity"}
    assert {
        *("loss", "heldout_loss", "heldout_perplexity", "tokens_per_second", "step_seconds", "mfu"),
        *("data_wait_share", "learning_rate", "gradient_norm", "step", "goodput", "restarts"),
    } <= GAUGE_DESCRIPTIONS.keys()


def test_all_that_a_step_records_is_in_the_table() -> None:
    known = {"kind", "loss", *UNSHOWN_FIELDS, *(metric.name for metric in STEP_METRICS)}
    record = report("generator", "discriminator").to_record()
    others = record.keys() - known
    assert {
        name for name in others if not name.endswith((TERM_LOSS.suffix, *(one.suffix for one in TERM_FIGURES)))
    } == set()


def test_rows_have_names_of_their_own() -> None:
    rows = (*STEP_METRICS, *HELD_OUT_METRICS)
    assert len({metric.name for metric in rows}) == len({metric.title for metric in rows}) == len(rows)
    gauges = [metric.gauge for metric in rows if metric.gauge]
    assert len(set(gauges)) == len(gauges)


@pytest.mark.parametrize(
    ("record", "value"),
    [
        ({"tokens": 100, "seconds": 0.5}, 200.0),
        ({"tokens": 100, "seconds": 0.5, "tokens_per_second": 7.0}, 7.0),
        ({"tokens": 100, "seconds": None}, None),
        ({}, None),
    ],
)
def test_a_ratio_is_taken_where_the_figure_is_not_recorded(
    record: dict[str, float | None], value: float | None
) -> None:
    assert THROUGHPUT.value_in(record) == value


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.31412, "31.4%"), (0.012345, "1.23%"), (1.2e-4, "0.01%"), (1e-7, "0%"), (1.0, "100%")],
)
def test_a_small_share_is_no_long_number(share: float, said: str) -> None:
    (mfu,) = (metric for metric in STEP_METRICS if metric.name == "mfu")
    assert mfu.value_text(share) == f"MFU {said}"
