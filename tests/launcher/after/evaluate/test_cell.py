"""Keys of cells: everything that decides a result, and no name."""

import json

from hypothesis import given
from hypothesis import strategies as st

from launcher.after.evaluate.cell import Cell
from tests.support.tasks.small_cells import cell

VALUES = st.one_of(
    st.integers(-3, 3), st.floats(allow_nan=False, allow_infinity=False), st.text("ab", max_size=3)
)
CELLS = st.builds(
    cell,
    weights=st.sampled_from("ab"),
    data=st.sampled_from("ab"),
    measure=st.sampled_from(["finetune", "embed"]),
    settings=st.dictionaries(st.sampled_from(["lr", "epochs", "batch"]), VALUES, max_size=3),
    seed=st.integers(0, 2),
)
DECIDING = ("weights", "data", "measure", "settings", "seed")


@given(CELLS, CELLS)
def test_cells_share_a_key_exactly_if_all_that_decides_is_the_same(one: Cell, other: Cell) -> None:
    def decided(of: Cell) -> str:
        return json.dumps([getattr(of, name) for name in DECIDING], sort_keys=True)

    assert (one.key == other.key) == (decided(one) == decided(other))


@given(CELLS, st.text("ab", max_size=5), st.integers(0, 9))
def test_names_change_nothing(one: Cell, name: str, step: int) -> None:
    assert one.model_copy(update={"source": name, "task": name, "step": step}).key == one.key


@given(CELLS)
def test_a_cell_that_was_written_and_read_has_the_same_key(one: Cell) -> None:
    assert Cell.model_validate_json(one.model_dump_json()).key == one.key


def test_a_key_stays_what_it_is() -> None:
    """Results of today are found tomorrow."""
    assert cell().key == "eeca02403f4d67af533c44e448e95d21"


def test_a_cell_has_a_name_for_messages() -> None:
    assert cell().name == "finetune of runs/base at step 100 on sst2, lr 1e-05, seed 0"
