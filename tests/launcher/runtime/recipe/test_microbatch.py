"""`microbatch: auto`: numbers in its place share the batch out evenly, within what memory permits."""

import math
import random

import pytest

from launcher.errors import RecipeError
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import BatchSize
from launcher.runtime.recipe.summary import has_automatic_microbatch, with_microbatch_rows


def test_rows_are_as_many_as_permitted_in_the_fewest_rounds() -> None:
    draw, recipe = random.Random(1), load("roberta-base", ("microbatch=auto",))

    def rounds(rows: int, size: int, ranks: int) -> int:
        return math.ceil(math.ceil(rows / size) / ranks)

    for _ in range(300):
        rows, ranks, most = draw.randint(1, 5000), draw.randint(1, 64), draw.randint(1, 600)
        phase = recipe.phases[0].model_copy(update={"batch": BatchSize(sequences=rows)})
        (own,) = with_microbatch_rows(
            recipe.model_copy(update={"phases": (phase,)}), ranks, [most]
        ).microbatch_rows_by_phase
        assert 1 <= own <= most
        assert rounds(rows, own, ranks) == math.ceil(rows / (most * ranks))
        assert own == 1 or rounds(rows, own - 1, ranks) > rounds(rows, own, ranks)


def test_xlnets_lanes_are_cut_equally() -> None:
    recipe = load("xlnet-base", ("microbatch=auto",))
    assert recipe.phases[0].rows_per_step == 256
    assert with_microbatch_rows(recipe, 3, [50]).microbatch_rows_by_phase == (32,)


def test_a_phase_may_have_its_own() -> None:
    recipe = load("bert-base", ("phases.0.microbatch=auto",))
    assert has_automatic_microbatch(recipe)
    assert with_microbatch_rows(recipe, 2).microbatch_rows_by_phase == (128, recipe.microbatch)
    assert not has_automatic_microbatch(load("bert-base"))


def test_more_ranks_than_rows_would_idle() -> None:
    assert load("bert-base", ("microbatch=auto",)).max_microbatches_per_step == 256


@pytest.mark.parametrize("value", ["0", "many", "1.5"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(RecipeError, match="microbatch"):
        load("bert-base", (f"microbatch={value}",))
