"""Memory in a checkpoint: beside the parameters, under the same rules, in any number of ranks' files."""

import re
from pathlib import Path

import pytest
import torch

from checkpoints.attempt import claim
from checkpoints.commit import CommittedSave, FailedSave
from checkpoints.errors import CheckpointError
from checkpoints.gather import Peers, SingleRank
from checkpoints.layout import CheckpointName
from checkpoints.listing import read_manifest
from checkpoints.load import CheckpointReader
from checkpoints.save import Saver
from checkpoints.verify import verify
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.train.zero_state import Fragment
from tests.support.ranks.checkpointing import KINDS, SHAPES, assert_holds, cut, on_threads, random_state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


MEMORY_SHAPES = {"memory.0": (6, 2, 4)}


def test_memory_comes_back_beside_the_parameters(store: Store) -> None:
    """Two of six lanes a rank; whoever loads takes other ranges."""
    attempt, remembered = claim(store), torch.arange(48.0)

    def work(peers: Peers) -> object:
        saver = Saver(store, attempt, peers)
        mine = [*cut(random_state(1), (50, 700), peers.rank), memory(remembered, peers.rank)]
        saver.begin(1, mine, SHAPES, {}, MEMORY_SHAPES)
        return saver.commit()

    assert all(isinstance(outcome, CommittedSave) for outcome in on_threads(3, work))
    manifest = read_manifest(store, CheckpointName(1, 1))
    assert verify(store, manifest) == []
    assert (manifest.shapes, manifest.memory, manifest.kinds) == (SHAPES, MEMORY_SHAPES, tuple(sorted(KINDS)))
    assert_holds(store, manifest, random_state(1))
    with CheckpointReader(store, manifest) as reader:
        assert torch.equal(reader.read("memory.0", "memory", 12, 40), remembered[12:40])
        assert reader.read_full("memory.0", "memory").shape == (6, 2, 4)
        with pytest.raises(CheckpointError, match=r"\b0 to 8\b.*master.*memory"):
            reader.read("memory.0", "master", 0, 8)
        with pytest.raises(CheckpointError, match=r"\b0 to 4\b.*memory.*scale"):
            reader.read("scale", "memory", 0, 4)


def test_memory_must_be_whole_too(store: Store) -> None:
    saver = Saver(store, claim(store), SingleRank())
    parts = [memory(torch.zeros(48), 0), memory(torch.zeros(48), 2)]
    saver.begin(1, [*cut(random_state(1), (), 0), *parts], SHAPES, {}, MEMORY_SHAPES)
    outcome = saver.commit()
    assert isinstance(outcome, FailedSave)
    assert re.search(r"memory\.0: .*\b16 to 32\b", outcome.reason)


def memory(remembered: torch.Tensor, rank: int) -> Fragment:
    return Fragment("memory.0", 16 * rank, {"memory": remembered[16 * rank : 16 * rank + 16]})
