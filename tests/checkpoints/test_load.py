"""Loading: any range, verified; the newest checkpoint that verifies, and why newer ones were passed over."""

import random
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.attempt import Attempt, claim
from checkpoints.errors import CheckpointError, DamagedCheckpoint, NoGoodCheckpoint
from checkpoints.gather import Peers, SingleRank
from checkpoints.layout import CHUNK_BYTES, CheckpointName
from checkpoints.listing import checkpoint_rows, list_committed, read_manifest
from checkpoints.load import CheckpointReader, MeanReader
from checkpoints.save import Saver
from checkpoints.verify import GoodCheckpoint, find_newest_good
from data_service.store.errors import StoreError
from data_service.store.local import LocalStore
from encoder_core.train.zero_state import Fragment
from tests.support.ranks.checkpointing import SHAPES, assert_holds, commit_steps, flip_bit, on_threads, random_state
from tests.support.stores.faulty import FaultyStore, set_fault


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run with checkpoints at steps 10, 20 and 30."""
    store = LocalStore(tmp_path / "run")
    commit_steps(store, claim(store), 10, 20, 30)
    return store


@pytest.mark.parametrize("name", ["manifest", "data"])
@pytest.mark.parametrize("where", [0, 0.3, 0.7, -1])
def test_a_flipped_bit_anywhere_falls_back(store: LocalStore, name: str, where: float) -> None:
    mark = CheckpointName(attempt=1, step=30)
    key = mark.manifest_key if name == "manifest" else mark.file_key(0)
    size = store.size(key) or 0
    flip_bit(store, key, int(where * size) if where >= 0 else size - 1)
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.step == 20
    assert len(good.passed_over) == 1
    assert "step 30 (attempt 1)" in good.passed_over[0]
    assert key in good.passed_over[0]
    assert_holds(store, good.manifest, random_state(20))


@pytest.mark.parametrize("full", [True, False])
def test_missing_and_truncated_files_fall_back(store: LocalStore, full: bool) -> None:
    store.delete(CheckpointName(1, 30).file_key(0))
    key = CheckpointName(1, 20).file_key(0)
    store.put(key, store.get(key)[:-1])
    good = find_newest_good(store, SingleRank(), full=full)
    assert good is not None
    assert good.manifest.step == 10
    missing, short = good.passed_over
    assert f"{CheckpointName(1, 30).file_key(0)} is missing" in missing
    assert "bytes instead of" in short


def test_a_manifest_in_a_wrong_folder_falls_back(store: LocalStore) -> None:
    store.put(CheckpointName(1, 40).manifest_key, store.get(CheckpointName(1, 10).manifest_key))
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.step == 30
    assert "is the manifest of step 10" in good.passed_over[0]


def test_checkpoints_but_no_good_one_is_an_error_with_all_reasons(store: LocalStore) -> None:
    for step in (10, 20, 30):
        flip_bit(store, CheckpointName(1, step).file_key(0), 100)
    with pytest.raises(NoGoodCheckpoint) as caught:
        find_newest_good(store, SingleRank())
    assert all(f"step {step} (attempt 1)" in caught.value.problem for step in (10, 20, 30))


def test_a_later_attempt_is_newer_than_a_higher_step(store: LocalStore) -> None:
    """After a fall-back or a rewind, what the run left behind must not come back."""
    base = read_manifest(store, CheckpointName(1, 10))
    Attempt(store, 1).record_end(0.0)
    commit_steps(store, claim(store), 15, resumed=base)
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.name == CheckpointName(2, 15)
    assert [(row.step, row.attempt, row.abandoned) for row in checkpoint_rows(store)] == [
        (15, 2, False),
        (30, 1, True),
        (20, 1, True),
        (10, 1, False),
    ]


def test_ranks_agree_and_share_the_work(store: LocalStore) -> None:
    flip_bit(store, CheckpointName(1, 30).file_key(0), 100)
    answers = on_threads(3, lambda peers: find_newest_good(store, peers))
    assert answers[0] == answers[1] == answers[2]
    assert isinstance(answers[0], GoodCheckpoint)
    assert answers[0].manifest.step == 20


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_fails_on_one_rank_is_an_error_on_all(store: LocalStore, failing: int) -> None:
    set_fault(store, "down")

    def work(peers: Peers) -> str:
        mine = FaultyStore(store.root) if peers.rank == failing else store
        with pytest.raises(StoreError) as caught:
            find_newest_good(mine, peers)
        return caught.value.problem

    problems = on_threads(2, work)
    assert problems[0] == problems[1]
    assert f"rank {failing}" in problems[0]


def test_ranges_across_chunks_and_pieces(tmp_path: Path) -> None:
    """A parameter of more than two chunks, in three pieces that end anywhere."""
    store = LocalStore(tmp_path / "run")
    size = 5 * CHUNK_BYTES // 8
    weight = torch.arange(size, dtype=torch.float32)
    saver = Saver(store, claim(store), SingleRank())
    ends = [0, 12_345, 1_048_577, size]
    pieces = [Fragment("w", start, {"master": weight[start:stop]}) for start, stop in pairwise(ends)]
    saver.begin(1, reversed(pieces), {"w": (size,)}, {})
    saver.commit()
    with CheckpointReader(store, read_manifest(store, CheckpointName(1, 1))) as reader:
        for start, stop in [(0, size), (12_344, 12_346), (1_048_570, 1_048_580), (5, 5), (size - 1, size)]:
            assert torch.equal(reader.read("w", "master", start, stop), weight[start:stop])
        small = torch.cat([reader.read("w", "master", at, at + 1000) for at in range(0, size - 1000, 100_003)])
        assert torch.equal(small, torch.cat([weight[at : at + 1000] for at in range(0, size - 1000, 100_003)]))


@pytest.mark.parametrize(
    ("name", "kind", "start", "stop"),
    [
        ("unknown", "master", 0, 1),
        ("scale", "momentum", 0, 1),
        ("scale", "master", 0, 2),
        ("layer.0.bias", "master", 3, 2),
    ],
)
def test_what_is_not_there_is_named(store: LocalStore, name: str, kind: str, start: int, stop: int) -> None:
    with (
        CheckpointReader(store, read_manifest(store, CheckpointName(1, 30))) as reader,
        pytest.raises(CheckpointError, match=name),
    ):
        reader.read(name, kind, start, stop)


def test_a_read_never_returns_damage(store: LocalStore) -> None:
    manifest = read_manifest(store, CheckpointName(1, 30))
    flip_bit(store, CheckpointName(1, 30).file_key(0), manifest.bytes // 2)
    with (
        CheckpointReader(store, manifest) as reader,
        pytest.raises(DamagedCheckpoint, match=r"hash.* \d+ to \d+"),
    ):
        [reader.read_full(name) for name in SHAPES]


MEAN_SHAPES = {"large": ((1 << 19) + 3, 2), "small": (7,), "scalar": (), "none": (0, 5)}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_mean_of_checkpoints_is_numpys_in_float64(tmp_path: Path, count: int) -> None:
    store, draw = LocalStore(tmp_path), random.Random(count)
    saver, weights = Saver(store, claim(store), SingleRank()), []
    for step in range(1, count + 1):
        generator = torch.Generator().manual_seed(step)
        state = {
            name: torch.randn(shape, generator=generator) * 10 ** (step - 3) for name, shape in MEAN_SHAPES.items()
        }
        fragments = []
        for name, tensor in state.items():
            cut = draw.randint(0, tensor.numel())
            for start, part in ((0, tensor.flatten()[:cut]), (cut, tensor.flatten()[cut:])):
                fragments.append(Fragment(name, start, {"master": part, "average": -part}))
        saver.begin(step, fragments, MEAN_SHAPES, {})
        saver.commit()
        weights.append({name: tensor.numpy() for name, tensor in state.items()})
    saver.close()
    with ExitStack() as reading:
        manifests = [read_manifest(store, mark) for mark in reversed(list_committed(store))]
        mean = MeanReader([reading.enter_context(CheckpointReader(store, manifest)) for manifest in manifests])
        for name, shape in MEAN_SHAPES.items():
            total = sum((each[name].astype(np.float64) for each in weights), np.zeros(shape))
            found = mean.read_full(name)
            assert found.shape == shape
            assert found.numpy().tobytes() == (total / count).astype(np.float32).tobytes()
