"""Results as objects: one is kept whoever writes, damage gives way, other versions of the rules are told apart."""

import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.base import Store, digest
from data_service.store.open import open_store
from launcher.after.evaluate.cell import RULES, Cell, CellFigures, GridRecord, Result, Results
from launcher.errors import RunError
from launcher.runtime.run.sealed import seal
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server
from tests.support.tasks.small_cells import cell


def result(of: Cell, accuracy: float, rules: int = RULES) -> Result:
    return Result(rules=rules, cell=of, measured=CellFigures(metrics={"accuracy": accuracy}), versions={})


@pytest.mark.long
def test_the_first_of_many_writers_is_kept_and_all_are_told_so(any_store: Store) -> None:
    kept: list[Result] = []
    writers = [
        threading.Thread(target=lambda n=number: kept.append(Results(any_store).keep(result(cell(), n / 8))))
        for number in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(kept) == 8
    assert len({one.model_dump_json() for one in kept}) == 1
    assert Results(any_store).find(cell().key) == kept[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results")


@pytest.mark.parametrize("stored", [b"", b"{", b'{"format": 1}', None])
def test_what_is_no_result_of_the_cell_gives_way_to_one(store: Store, stored: bytes | None) -> None:
    """Cut short, of another shape, or another cell's under this one's name."""
    other = seal(result(cell(seed=7), 0.1))
    store.put(f"rules-{RULES}/{cell().key}.json", other if stored is None else stored)
    results = Results(store)
    assert results.find(cell().key) is None
    assert results.find_all([cell().key]) == {}
    wanted = result(cell(), 0.5)
    assert results.keep(wanted) == wanted
    assert results.find(cell().key) == wanted


def test_what_a_newer_version_has_computed_is_refused_and_kept(store: Store) -> None:
    newer = json.loads(result(cell(), 0.1).model_dump_json()) | {"confidence": 0.9}
    text = json.dumps(newer)
    place = f"rules-{RULES}/{cell().key}.json"
    store.put(place, stored := f'{{"digest": "{digest(text.encode())}", "content": {text}}}\n'.encode())
    results = Results(store)
    for use in (lambda: results.find(cell().key), lambda: results.keep(result(cell(), 0.5))):
        with pytest.raises(RunError, match="newer"):
            use()
    assert store.get(place) == stored


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_never_taken_for_a_figure(place: int, bit: int) -> None:
    data = bytearray(seal(result(cell(), 0.5)))
    data[place % len(data)] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        store.put(f"rules-{RULES}/{cell().key}.json", bytes(data))
        assert Results(store).find(cell().key) in (None, result(cell(), 0.5))


def test_what_was_only_read_badly_is_read_again(faults: FaultProxy, s3: S3Server) -> None:
    store = open_store(f"s3://{s3.new_bucket()}")
    Results(store).keep(result(cell(), 0.5))
    faults.plan.extend(["garble", "garble"])
    assert Results(store).find(cell().key) == result(cell(), 0.5)


def test_all_that_are_there_are_found(store: Store) -> None:
    results, cells = Results(store), [cell(seed=seed) for seed in range(50)]
    for one in cells[::3]:
        results.keep(result(one, one.seed / 50))
    found = results.find_all(one.key for one in cells)
    assert found == {one.key: result(one, one.seed / 50) for one in cells[::3]}


def test_results_of_other_rules_are_counted_and_not_used(store: Store) -> None:
    for seed in range(3):
        Results(store, rules=1).keep(result(cell(seed=seed), 0.1, rules=1))
    Results(store, rules=3).keep(result(cell(seed=0), 0.3, rules=3))
    now = Results(store, rules=2)
    keys = [cell(seed=seed).key for seed in range(2)]
    assert now.find_all(keys) == {}
    assert now.under_other_rules(keys) == {1: 2, 3: 1}
    now.keep(result(cell(), 0.2, rules=2))
    assert Results(store, rules=1).find(cell().key) == result(cell(), 0.1, rules=1)


def test_grids_are_kept_once_each_the_oldest_first(store: Store) -> None:
    results = Results(store)
    grids = [GridRecord(suite="glue", cells=(cell(seed=seed),)) for seed in range(2)]
    for grid in (*grids, *grids):
        results.keep_grid(grid)
    store.put("grids/broken.json", b"{")
    assert sorted(results.grids(), key=lambda grid: grid.cells[0].seed) == grids
