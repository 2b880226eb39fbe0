"""The rows that fit by the estimate: a few more would not."""

from dataclasses import replace
from typing import get_args

import pytest

from encoder_core.train.zero_memory import Device, total_bytes
from launcher.plan.estimate.estimate import estimate_recipe
from launcher.plan.estimate.render import estimate_figures, render_text
from launcher.runtime.capacity.devices import Cluster, find_gpu, usable_gpu_bytes
from launcher.runtime.capacity.memory_fit import CPU_MICROBATCH_TOKENS, RankMemory, microbatch_memory, rows_that_fit
from launcher.runtime.capacity.workload import microbatch_cost, microbatch_shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import RecipePhase
from launcher.runtime.recipe.summary import with_vocab

DEVICES: tuple[Device, ...] = get_args(Device)


def filled(bill: RankMemory, phase: RecipePhase, rows: int) -> int:
    return bill.fixed_bytes(phase) + total_bytes(
        bill.memory_of_microbatches(phase, rows).parts(rows * bill.recipe.input.texts_per_row)
    )


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("bert-base", DEVICES, (4, 80)),
        ("modernbert-base", DEVICES[:1], (24,)),
        ("contrastive-base", DEVICES[:1], (24,)),
    ],
)
def test_a_few_rows_more_would_not_fit(name: str, devices: tuple[Device, ...], sizes: tuple[int, ...]) -> None:
    recipe = load(name, ("microbatch=auto", "model.layers=2"))
    for device in devices:
        bill = RankMemory.from_recipe(recipe, 2, device)
        for gib in sizes:
            found = rows_that_fit(bill, gib << 30)
            for phase, rows in zip(bill.recipe.phases, found, strict=True):
                assert rows == 1 or filled(bill, phase, rows) <= 1.1 * (gib << 30)
                useful = -(-phase.rows_per_step // 2)
                if device == "cpu":
                    useful = max(1, min(useful, CPU_MICROBATCH_TOKENS // (phase.length * recipe.input.texts_per_row)))
                more = min(useful, rows + 1 + rows // 16)
                assert rows == useful or filled(bill, phase, more) > 0.85 * (gib << 30)
                assert bill.fixed_bytes(phase) < filled(bill, phase, rows)


@pytest.mark.long
def test_an_estimate_goes_by_what_fits_and_says_so() -> None:
    cluster = Cluster(1, 8, find_gpu("A100-40"), 3600.0 * 1000)
    found = estimate_recipe(load("roberta-large", ("microbatch=auto",)), cluster)
    assert found.configured_memory is not None
    assert found.configured_memory.fits
    rows = found.recipe.microbatch_rows_by_phase
    assert f"microbatch: auto takes {rows[0]} rows at ZeRO 1" in render_text(found)
    assert estimate_figures(found)["microbatch"] == list(rows)
    smaller = estimate_recipe(load("roberta-large", ("microbatch=auto",)), replace(cluster, gpu=find_gpu("L4")))
    assert smaller.recipe.microbatch_rows_by_phase < rows
    assert smaller.configured_memory is not None
    assert smaller.configured_memory.total_bytes <= usable_gpu_bytes(find_gpu("L4").memory)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["roberta-base", "deberta-v3-base", "contrastive-base"])
def test_memory_between_the_counted_sizes_is_near_that_counted_there(name: str) -> None:
    """At its peak at most 8 % less and 10 % more."""
    recipe = load(name, ("microbatch=64",))
    recipe = recipe.model_copy(update={"model": with_vocab(recipe.model)})
    shape = microbatch_shape(recipe, recipe.phases[0])
    between = microbatch_memory(recipe, shape)
    for rows in (shape.group, shape.rows // 4, shape.rows):
        peak = max(group.peak for group in microbatch_cost(recipe, replace(shape, rows=rows)).bytes)
        assert 0.92 * peak <= total_bytes(between.parts(rows)) <= 1.1 * peak
