"""The rows that fit by the estimate: one more would not."""

from dataclasses import replace
from typing import get_args

import pytest

from encoder_core.layers.sizes import CHUNKS
from encoder_core.terms.composition import chunk_of_logits
from launcher.plan.estimate.estimate import estimate
from launcher.plan.estimate.render import figures, render
from launcher.runtime.capacity.devices import Cluster, find_gpu, usable
from launcher.runtime.capacity.memory_fit import CPU_TOKENS, Bill, Device, rows_that_fit
from launcher.runtime.capacity.workload import microbatch_shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.summary import known

RECIPES = ("bert-large", "deberta-v3-base", "xlnet-base", "modernbert-base", "contrastive-base")


@pytest.mark.parametrize("name", RECIPES)
def test_one_row_more_would_not_fit(name: str) -> None:
    recipe = load(name, ("microbatch=auto",))
    for device in get_args(Device):
        bill = Bill.of(recipe, 2, device)
        for gib in (4, 24, 80):
            found = rows_that_fit(bill, gib << 30)
            for phase, rows in zip(bill.recipe.phases, found, strict=True):
                assert rows == 1 or bill.with_rows(phase, rows) <= gib << 30
                useful = -(-phase.rows // 2)
                if device == "cpu":
                    useful = max(1, min(useful, CPU_TOKENS // (phase.length * recipe.input.texts)))
                assert rows == useful or bill.with_rows(phase, rows + 1) > gib << 30
                assert bill.kept(phase) < bill.with_rows(phase, rows)


@pytest.mark.long
def test_an_estimate_goes_by_what_fits_and_says_so() -> None:
    cluster = Cluster(1, 8, find_gpu("A100-40"), 3600.0 * 1000)
    found = estimate(load("roberta-large", ("microbatch=auto",)), cluster)
    assert found.as_configured is not None
    assert found.as_configured.fits
    rows = found.recipe.phase_microbatches
    assert f"microbatch: auto takes {rows[0]} rows at ZeRO 1" in render(found)
    assert figures(found)["microbatch"] == list(rows)
    smaller = estimate(load("roberta-large", ("microbatch=auto",)), replace(cluster, gpu=find_gpu("L4")))
    assert smaller.recipe.phase_microbatches < rows
    assert smaller.as_configured is not None
    assert smaller.as_configured.bytes <= usable(find_gpu("L4").memory)


@pytest.mark.parametrize("name", RECIPES)
def test_a_chunk_of_logits_is_no_larger_than_there_are_targets(name: str) -> None:
    recipe = load(name, ("microbatch=1",))
    model, wanted = known(recipe.model), recipe.objective.terms
    shape = microbatch_shape(recipe, recipe.phases[0])
    for kernel, most in (("gpu", CHUNKS["cuda"]), ("cpu", CHUNKS["cpu"])):
        few, many = (
            chunk_of_logits(model, wanted, replace(shape, rows=rows), kernel)  # type: ignore[arg-type]
            for rows in (1, 4000)
        )
        if name == "contrastive-base":
            assert (few, many) == (0, 0)
        else:
            assert (few, many) == (min(most, shape.targets_per_row * model.vocabulary), most)
