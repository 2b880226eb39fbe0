"""Checkpoints of real processes joined by gloo: agreement, failure on one rank, other world sizes."""

from pathlib import Path

import pytest

from checkpoints.attempt import claim
from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from data_service.store.local import LocalStore
from tests.support.ranks.checkpointing import flip_bit, gather, load_at, one_rank_leaves, save_and_fail_and_save
from tests.support.ranks.forked import run_ranks

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_gather_carries_json_of_any_length() -> None:
    expected = [{"rank": rank, "text": "ä" * (10 ** (2 * rank))} for rank in range(3)]
    for rank, (to_all, short, to_first, *from_first) in enumerate(run_ranks(gather, 3)):
        assert (to_all, short) == (expected, [[1.5, True], None, None])
        assert to_first == ([] if rank else expected)
        assert from_first == [0, expected[0]]


def test_three_ranks_save_and_one_or_two_load(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    claim(store)
    outcomes = run_ranks(save_and_fail_and_save, 3, store.uri)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0] == "committed 10"
    assert outcomes[0][1].startswith("failed 20: rank 2: ")
    assert outcomes[0][2] == "committed 30"
    assert run_ranks(load_at, 1, store.uri) == [(30, [], True)]
    key = CheckpointName(1, 30).file_key(2)
    flip_bit(store, key)
    found = run_ranks(load_at, 2, store.uri)
    assert found[0] == found[1]
    step, passed_over, right = found[0]
    assert (step, right) == (10, True)
    assert key in passed_over[0]


def test_a_rank_that_leaves_keeps_nobody_waiting_and_no_checkpoint(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    claim(store)
    found = run_ranks(one_rank_leaves, 3, store.uri)
    assert found[2] == "left"
    assert all(text.startswith("raised: ") for text in found[:2])
    assert list_committed(store) == []
