"""`evaluation.before`: each evaluation measures the text of the start, too, and training does not notice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.errors import CorpusError, TokenizerError, UserError
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from launcher.observe.inspect.report.curves import report_charts
from launcher.runtime.run.history import read_history
from launcher.runtime.run.metrics import term_losses, tracker_figures
from launcher.runtime.run.record import open_run
from tests.support.data.made_up import write_text
from tests.support.ranks.run_group import finish
from tests.support.runs.small_runs import build_text, history, losses, new_run, operate, prepare_corpus

SETTINGS = ("phases=[{steps: 6, length: 32, batch: {sequences: 12}}]",)


def build(folder: Path, name: str, tokenizer: str, *, heldout: float = 0.1, documents: int = 40) -> str:
    write_text(folder / f"{name}.jsonl", documents, seed=9)
    build_text(folder / f"{name}.jsonl", f"{folder}/{name}", tokenizer, heldout_fraction=heldout)
    return f"{folder}/{name}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("before")
    prepare_corpus(place)
    build(place, "old", f"{place}/tokenizer")
    return place


def evaluating(before: object) -> str:
    return f"evaluation={json.dumps({'every': {'steps': 3}, 'samples': 12, 'before': before})}"


def before_of(record: Any) -> dict[str, float]:
    return {name.removeprefix("before_"): value for name, value in record.items() if name.startswith("before_")}


def test_both_texts_are_measured_and_drawn(place: Path) -> None:
    old, own = (
        finish(new_run(place, name, *SETTINGS, evaluating({"uri": f"{place}/{corpus}"})), 2)
        for name, corpus in (("with-old", "old"), ("with-own", "corpus"))
    )
    assert losses(old) == losses(own), "what is evaluated changes nothing in training"
    for one, other in zip(history(old).evaluations, history(own).evaluations, strict=True):
        ours = {name: value for name, value in one.items() if name[:7] != "before_"}
        assert ours == {name: value for name, value in other.items() if name[:7] != "before_"}
        assert before_of(other).items() <= ours.items(), "the run's own text, measured twice"
        assert before_of(one).keys() == before_of(other).keys()
        assert before_of(one)["mlm_loss"] != ours["mlm_loss"]
        assert tracker_figures(one)["heldout/before_mlm_loss"] == one["before_mlm_loss"]
        assert list(term_losses(one)) == ["mlm", "before_mlm"], "each loss is shown once"
    drawn = {chart.title: chart for chart in report_charts(read_history(open_run(old).store), (), {})}
    curves = {series.name: series for series in drawn["MLM loss"].series}
    assert list(curves) == ["training", "held out", "before"]
    expected = [record["before_mlm_loss"] for record in history(old).evaluations]
    np.testing.assert_array_equal(curves["before"].y, expected)
    assert not any(title.startswith("BEFORE") for title in drawn)


def test_it_may_come_and_go_at_any_start(place: Path) -> None:
    uri = new_run(place, "later", *SETTINGS, "evaluation={every: {steps: 3}, samples: 12}")
    operate(uri, f"evaluation.before={{uri: {place}/old}}")
    finish(uri, 1)
    assert all("before_mlm_loss" in record for record in history(uri).evaluations)


def test_what_cannot_be_evaluated_is_refused(place: Path) -> None:
    texts = (json.loads(line)["text"] for line in (place / "old.jsonl").open())
    save_tokenizer(train_tokenizer("byte_bpe", texts, 300), f"{place}/another")
    wrong: dict[str, tuple[type[UserError], str]] = {
        build(place, "foreign", f"{place}/another"): (TokenizerError, "another tokenizer"),
        build(place, "whole", f"{place}/tokenizer", heldout=0.0): (CorpusError, "no held-out text"),
        f"{place}/nowhere": (CorpusError, "nowhere"),
    }
    for uri, (kind, message) in wrong.items():
        with pytest.raises(kind, match=message):
            new_run(place, "refused", *SETTINGS, evaluating({"uri": uri}))
