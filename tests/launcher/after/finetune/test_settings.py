"""Settings of a fine-tuning, and the grids that a task's lists of values span."""

import pytest

from launcher.after.finetune.settings import FinetuneSettings, settings_grid
from launcher.errors import OptionError


def test_every_combination_of_the_lists_the_first_values_first() -> None:
    found = settings_grid({"lr": [1e-5, 3e-5], "batch": [16, 32]})
    assert [(one.lr, one.batch) for one in found] == [(1e-5, 16), (1e-5, 32), (3e-5, 16), (3e-5, 32)]
    assert settings_grid({}) == (FinetuneSettings(),)


def test_a_pair_of_betas_is_one_value() -> None:
    assert [one.adam_betas for one in settings_grid({"adam_betas": [0.9, 0.98]})] == [(0.9, 0.98)]
    two = settings_grid({"adam_betas": [[0.9, 0.98], [0.9, 0.999]]})
    assert [one.adam_betas for one in two] == [(0.9, 0.98), (0.9, 0.999)]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lrr": 1e-5}, "fine-tuning: lrr is not a key"),
        ({"lr": -1}, "fine-tuning: lr = -1"),
        ({"lr": []}, "empty list"),
        ({"lr": float("nan")}, "lr"),
        ({"layer_decay": 1.5}, "layer_decay"),
        ({"freeze": True}, "freeze"),
        ({"batch": 16, "microbatch": 5}, "does not divide"),
        ({"keep": "last", "patience": 1}, "patience"),
        ({"adam_betas": [0.9, 1.0]}, "adam_betas"),
    ],
)
def test_values_that_cannot_be_are_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        settings_grid(given)
    assert problem in raised.value.problem
    assert raised.value.remedy
