"""Saving: what is written is what was there when it began, from any number of ranks, or it is not a checkpoint."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from safetensors.torch import load_file

from checkpoints.attempt import Attempt, claim
from checkpoints.commit import CommittedSave, FailedSave
from checkpoints.errors import CheckpointError, Superseded
from checkpoints.gather import Peers, SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName, LineageSegment, decode_manifest, encode_manifest
from checkpoints.listing import list_committed, read_manifest
from checkpoints.load import CheckpointReader
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good, verify
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from encoder_core.train.zero_state import Fragment
from tests.support.ranks.checkpointing import KINDS, SHAPES, assert_holds, cut, cut_each, on_threads, random_state, save
from tests.support.stores.faulty import FaultyStore, set_fault


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


@pytest.fixture
def attempt(store: Store) -> Attempt:
    return claim(store)


def test_a_checkpoint_on_every_kind_of_store(any_store: Store) -> None:
    attempt = claim(any_store)
    outcome = save(Saver(any_store, attempt, SingleRank()), 10, seed=1)
    assert isinstance(outcome, CommittedSave)
    good = find_newest_good(any_store, SingleRank())
    assert good is not None
    assert good.passed_over == ()
    assert good.manifest.name == CheckpointName(attempt=1, step=10)
    assert good.manifest.state == {"step": 10, "seed": 1}
    assert outcome.bytes == good.manifest.bytes
    assert_holds(any_store, good.manifest, random_state(1))


@pytest.mark.heavy
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_loads_as_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shapes: dict[str, tuple[int, ...]] = data.draw(
        st.dictionaries(st.text(min_size=1, max_size=4), st.tuples(st.integers(0, 40)), min_size=1, max_size=5)
    )
    total = sum(shape[0] for shape in shapes.values())
    world = data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
    each = data.draw(st.booleans())
    state = random_state(0, shapes)
    store = open_store(tmp_path_factory.mktemp("run"))
    attempt = claim(store)

    def work(peers: Peers) -> bool:
        saver = Saver(store, attempt, peers)
        mine = cut_each(state, world, peers.rank) if each else cut(state, cuts, peers.rank)
        saver.begin(1, mine, shapes, {})
        return isinstance(saver.commit(), CommittedSave)

    assert all(on_threads(world, work)) or total == 0
    if total:
        manifest = read_manifest(store, CheckpointName(attempt=1, step=1))
        assert_holds(store, manifest, state)
        with CheckpointReader(store, manifest) as reader:
            for name, shape in shapes.items():
                start = data.draw(st.integers(0, shape[0]))
                stop = data.draw(st.integers(start, shape[0]))
                assert torch.equal(reader.read(name, "exp_avg", start, stop), state[name]["exp_avg"][start:stop])


def test_files_are_plain_safetensors(store: LocalStore, attempt: Attempt) -> None:
    save(Saver(store, attempt, SingleRank()), 10, seed=1)
    tensors = load_file(store.root / CheckpointName(1, 10).file_key(0))
    state = random_state(1)
    assert torch.equal(tensors["embed.weight:exp_avg:0"], state["embed.weight"]["exp_avg"])
    assert len(tensors) == 4 * len(KINDS)  # the empty parameter has no elements


def test_what_is_saved_is_what_was_there_when_it_began(store: LocalStore, attempt: Attempt) -> None:
    set_fault(store, "hangs")
    saver = Saver(FaultyStore(store.root), attempt, SingleRank())
    losses: list[JsonValue] = [1.0]
    state = random_state(1)
    saver.begin(10, cut(state, (), 0), SHAPES, {"metrics": {"loss": losses}})
    for kinds in state.values():  # training goes on
        for tensor in kinds.values():
            tensor.zero_()
    losses.append(2.0)
    assert saver.pending_step == 10
    assert not saver.ready()
    set_fault(store, None)
    saver.wait_for_all(lambda sent: None)
    assert saver.ready()
    assert isinstance(saver.commit(), CommittedSave)
    assert saver.pending_step is None
    assert not saver.ready()
    assert saver.last_step == 10
    manifest = read_manifest(store, CheckpointName(1, 10))
    assert manifest.state == {"metrics": {"loss": [1.0]}}
    assert_holds(store, manifest, random_state(1))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_state_comes_back_exactly(value: JsonValue) -> None:
    manifest = CheckpointManifest(
        step=1,
        attempt=1,
        world_size=1,
        shapes={},
        kinds=(),
        files=(),
        pieces=(),
        state={"": value},
        lineage=(LineageSegment(attempt=1, start=0, stop=1),),
        versions={},
        created=0.0,
    )
    assert decode_manifest(encode_manifest(manifest), "here") == manifest


def test_state_that_json_cannot_hold_is_refused_at_once(store: Store, attempt: Attempt) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Saver(store, attempt, SingleRank()).begin(1, [], {}, {"loss": float("nan")})
    assert list(store.list("checkpoints/")) == []


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([(0, 50), (60, 100)], "no rank holds elements 50 to 60"),
        ([(0, 60), (50, 100)], "two ranks hold elements 50 to 60"),
        ([(0, 50), (50, 90)], "100 elements, but the ranks' pieces end at 90"),
        ([(0, 50), (50, 110)], "100 elements, but the ranks' pieces end at 110"),
        ([(0, 100), (0, 100)], "two ranks hold elements 0 to 100"),
    ],
)
def test_only_exact_cover_is_a_checkpoint(
    store: Store, attempt: Attempt, shares: Sequence[tuple[int, int]], reason: str
) -> None:
    def work(peers: Peers) -> object:
        start, stop = shares[peers.rank]
        saver = Saver(store, attempt, peers)
        saver.begin(1, [Fragment("w", start, {"master": torch.zeros(stop - start)})], {"w": (10, 10)}, {})
        return saver.commit()

    outcomes = on_threads(2, work)
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], FailedSave)
    assert reason in outcomes[0].reason
    assert list_committed(store) == []


@pytest.mark.parametrize(
    ("fragments", "reason"),
    [
        ([Fragment("stranger", 0, {"master": torch.zeros(4)})], "'stranger' is no parameter"),
        ([Fragment("b", 0, {"exp_avg": torch.zeros(3)})], "b has ['exp_avg'], others have"),
    ],
)
def test_names_and_kinds_must_agree(store: Store, attempt: Attempt, fragments: list[Fragment], reason: str) -> None:
    saver = Saver(store, attempt, SingleRank())
    saver.begin(1, [Fragment("a", 0, {"master": torch.zeros(4)}), *fragments], {"a": (4,), "b": (3,)}, {})
    outcome = saver.commit()
    assert isinstance(outcome, FailedSave)
    assert reason in outcome.reason


@pytest.mark.parametrize(
    "tensors",
    [
        {"master": torch.zeros(4, dtype=torch.bfloat16)},
        {"master": torch.zeros(2, 2)},
        {"master": torch.zeros(4), "exp_avg": torch.zeros(3)},
    ],
)
def test_malformed_fragments_are_refused(store: Store, attempt: Attempt, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match="'w'"):
        Saver(store, attempt, SingleRank()).begin(1, [Fragment("w", 0, tensors)], {"w": (4,)}, {})


def test_ranks_at_different_steps_commit_nothing(store: Store, attempt: Attempt) -> None:
    def work(peers: Peers) -> object:
        saver = Saver(store, attempt, peers)
        saver.begin(10 + peers.rank, cut(random_state(1), (50,), peers.rank), SHAPES, {})
        return saver.commit()

    outcomes = on_threads(2, work)
    assert all(isinstance(outcome, FailedSave) and "steps" in outcome.reason for outcome in outcomes)


def test_one_save_at_a_time_and_only_forward(store: Store, attempt: Attempt) -> None:
    saver = Saver(store, attempt, SingleRank())
    with pytest.raises(CheckpointError, match="begin"):
        saver.commit()
    saver.begin(10, cut(random_state(1), (), 0), SHAPES, {})
    with pytest.raises(CheckpointError, match=r"\b11\b.*step 10"):
        saver.begin(11, [], SHAPES, {})
    saver.commit()
    with pytest.raises(CheckpointError, match=r"\b10\b.*step 10"):
        saver.begin(10, [], SHAPES, {})


def test_a_zombie_cannot_commit_and_every_rank_hears_why(store: Store, attempt: Attempt) -> None:
    attempt.record_end(0.0)

    def work(peers: Peers) -> str:
        saver = Saver(store, attempt, peers)
        saver.begin(10, cut(random_state(1), (50,), peers.rank), SHAPES, {})
        if peers.rank == 0:
            claim(store)
        peers.all_gather(None)
        with pytest.raises(Superseded, match="attempt 2") as caught:
            saver.commit()
        return caught.value.problem

    assert len(set(on_threads(2, work))) == 1
    assert list_committed(store) == []


def test_a_commit_that_failed_can_be_tried_again(store: LocalStore, attempt: Attempt) -> None:
    set_fault(store, "full")
    saver = Saver(FaultyStore(store.root), attempt, SingleRank())
    outcome = save(saver, 10, seed=1)
    assert isinstance(outcome, FailedSave)
    assert re.search(r"rank 0: .*\bspace\b", outcome.reason)
    assert saver.last_step is None
    set_fault(store, None)
    assert isinstance(save(saver, 10, seed=1), CommittedSave)


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
