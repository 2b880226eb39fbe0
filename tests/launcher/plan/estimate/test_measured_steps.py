"""The roofline against steps of one H200 (2026-11-26, torch 2.11.0, Triton 3.6.0): two microbatches of 32,768 tokens on
one rank, in bf16, timed alone, with the kernels that a trial chose.
"""

import pytest

from launcher.plan.estimate.roofline import roofline, update_seconds
from launcher.runtime.capacity.devices import find_gpu
from launcher.runtime.capacity.workload import full_rows, phase_targets
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import known

H200, TOKENS, ROUNDS = find_gpu("H200"), 32_768, 2


def recipe_of(name: str, dropout: bool, compiled: bool) -> Recipe:
    recipe = load(name)
    drops = {} if dropout else {"dropout": 0.0, "attention_dropout": 0.0}
    model = known(recipe.model).model_copy(update=drops)
    return recipe.model_copy(
        update={"model": model, "precision": "bf16", "compile": "auto" if compiled else False}
    )


@pytest.mark.parametrize(
    ("name", "length", "dropout", "compiled", "milliseconds", "within"),
    [
        ("bert-large", 128, True, True, 308.2, 0.06),
        ("bert-large", 512, True, True, 365.9, 0.06),
        ("bert-large", 512, True, False, 358.7, 0.06),
        ("bert-large", 512, False, True, 324.7, 0.06),
        ("roberta-base", 512, True, True, 132.2, 0.06),
        ("deberta-v3-base", 512, True, True, 548.2, 0.17),  # its mask decoder's tiles are not counted
        ("modernbert-base", 1024, True, True, 206.7, 0.17),  # its update is counted as an AdamW's
    ],
)
def test_measured_steps_are_estimated(
    name: str, length: int, dropout: bool, compiled: bool, milliseconds: float, within: float
) -> None:
    recipe = recipe_of(name, dropout, compiled)
    phase = recipe.phases[0]
    shape = full_rows(recipe, TOKENS // length, length, phase_targets(recipe, phase) * length // phase.length)
    step = ROUNDS * roofline(recipe, shape, H200).seconds + update_seconds(recipe, H200)
    assert 1e3 * step == pytest.approx(milliseconds, rel=within)
