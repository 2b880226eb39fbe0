"""What ranks do in the checkpoint tests with real processes; importable by name, as `run_ranks` needs."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from pydantic import JsonValue
from trainers import SHAPES, cut, cut_each, random_state

from checkpoints.attempt import Attempt
from checkpoints.commit import Committed, Failed
from checkpoints.gather import GlooPeers
from checkpoints.load import Reader, newest_good
from checkpoints.save import Saver
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace
from data_service.store.open import open_store


def gather(rank: int, world: int) -> list[object]:
    """Values of very different lengths, twice."""
    peers = GlooPeers(dist.new_group(backend="gloo"))
    mine: JsonValue = {"rank": rank, "text": "ä" * (10 ** (2 * rank))}
    first = peers.all_gather(mine)
    second = peers.all_gather(None if rank else [1.5, True])
    return [first, second, peers.gather_to_first(mine), peers.from_first(rank), peers.from_first(mine)]


def save_and_fail_and_save(rank: int, world: int, uri: str) -> list[str]:
    """Step 10 cut as ZeRO-3 does; step 20 fails on the last rank; step 30 cut as ZeRO-1 does."""
    store = open_store(uri)
    peers = GlooPeers(dist.new_group(backend="gloo"))
    attempt = Attempt(store, 1)
    saver = Saver(store, attempt, peers)
    saver.begin(10, cut_each(random_state(10), world, rank), SHAPES, {"rank": rank})
    outcomes = [saver.commit()]
    failing = Saver(_Full(store) if rank == world - 1 else store, attempt, peers)
    failing.begin(20, cut_each(random_state(20), world, rank), SHAPES, {})
    outcomes.append(failing.commit())
    saver.begin(30, cut(random_state(30), (100, 1200), rank), SHAPES, {"rank": rank})
    outcomes.append(saver.commit())
    return [_show(outcome) for outcome in outcomes]


def load_at(rank: int, world: int, uri: str) -> tuple[int, list[str], bool]:
    """The newest good step, what was passed over, and whether this rank's equal share of it is right."""
    store = open_store(uri)
    good = newest_good(store, GlooPeers(dist.new_group(backend="gloo")))
    assert good is not None
    step = good.manifest.step
    with Reader(store, good.manifest) as reader:
        right = all(
            reader.read(mine.name, kind, mine.start, mine.start + tensor.numel()).equal(tensor)
            for mine in cut_each(random_state(step), world, rank)
            for kind, tensor in mine.tensors.items()
        )
    return step, list(good.passed_over), right


def one_rank_leaves(rank: int, world: int, uri: str) -> str:
    """The last rank ends before the commit; what the others see."""
    store = open_store(uri)
    peers = GlooPeers(dist.new_group(backend="gloo", timeout=timedelta(seconds=20)))
    saver = Saver(store, Attempt(store, 1), peers)
    saver.begin(10, cut_each(random_state(10), world, rank), SHAPES, {})
    saver.wait()
    if rank == world - 1:
        return "left"
    try:
        saver.commit()
    except RuntimeError as error:
        return f"raised: {type(error).__name__}"
    return "committed"


def _show(outcome: Committed | Failed) -> str:
    match outcome:
        case Committed():
            return f"committed {outcome.step}"
        case Failed():
            return f"failed {outcome.step}: {outcome.reason}"


class _Full:
    """A store without room."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_buffers(self, key: str, buffers: Sequence[memoryview], sent: object = None) -> None:
        raise OutOfSpace.at(f"{self._store.uri}/{key}", "quota")
