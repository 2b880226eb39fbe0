"""Checkpoints without a trainer: random state cut among ranks as ZeRO cuts it, ranks that are threads or processes.

What ends in processes is importable by name, as `run_ranks` needs.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from checkpoints.attempt import Attempt
from checkpoints.commit import CommittedSave, FailedSave, SaveOutcome
from checkpoints.gather import Peers, SingleRank
from checkpoints.gloo_peers import GlooPeers
from checkpoints.layout import CheckpointManifest
from checkpoints.load import CheckpointReader
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from encoder_core.train.zero_state import Fragment

_T = TypeVar("_T")
KINDS = ("master", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, Tensor]]  # parameter -> kind -> flat tensor

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (97, 12),
    "layer.0.weight": (12, 12),
    "layer.0.bias": (12,),
    "scale": (),
    "none": (0, 5),
}


def random_state(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> State:
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    return {name: {kind: torch.randn(size, generator=generator) for kind in KINDS} for name, size in sizes.items()}


def cut(state: State, cuts: Sequence[int], rank: int) -> Iterator[Fragment]:
    """Rank's fragments when all parameters, laid end to end, are cut at `cuts` (ZeRO-1 and 2: one flat buffer)."""
    begin, end = [0, *cuts, 1 << 62][rank : rank + 2]
    first = 0
    for name, kinds in state.items():
        size = kinds["master"].numel()
        start, stop = max(begin - first, 0), min(end - first, size)
        if start < stop:
            yield Fragment(name, start, {kind: tensor[start:stop] for kind, tensor in kinds.items()})
        first += size


def cut_each(state: State, world: int, rank: int) -> Iterator[Fragment]:
    """Rank's fragments when every parameter is cut in `world` equal parts, the last ones shorter (ZeRO-3)."""
    for name, kinds in state.items():
        size = kinds["master"].numel()
        part = -(-size // world)
        start, stop = min(rank * part, size), min((rank + 1) * part, size)
        yield Fragment(name, start, {kind: tensor[start:stop] for kind, tensor in kinds.items()})


def save(saver: Saver, step: int, seed: int) -> SaveOutcome:
    """Saves `random_state(seed)` as the only rank."""
    saver.begin(step, cut(random_state(seed), (), 0), SHAPES, {"step": step, "seed": seed})
    return saver.commit()


def commit_steps(store: Store, attempt: Attempt, *steps: int, resumed: CheckpointManifest | None = None) -> None:
    """Commits a checkpoint at each step, with the step as its seed, as the only rank."""
    saver = Saver(store, attempt, SingleRank(), resumed=resumed)
    for step in steps:
        assert isinstance(save(saver, step, step), CommittedSave)
    saver.close()


def assert_holds(store: Store, manifest: CheckpointManifest, state: State) -> None:
    """The checkpoint, read parameter by parameter, is `state` bit for bit."""
    with CheckpointReader(store, manifest) as reader:
        for name, kinds in state.items():
            for kind, tensor in kinds.items():
                found = reader.read_full(name, kind)
                assert tuple(found.shape) == manifest.shapes[name]
                assert torch.equal(found.flatten(), tensor), (name, kind)


def flip_bit(store: Store, key: str, position: int = -1) -> None:
    """Damages one byte of an object, whose size stays."""
    data = bytearray(store.get(key))
    data[position] ^= 1
    store.put(key, bytes(data))


class ThreadPeers:
    """One of several ranks that are threads of this process.

    Attributes:
        received: characters of JSON that this rank has been sent by the others.
    """

    def __init__(self, rank: int, board: list[JsonValue], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world = len(board)
        self.received = 0
        self._board = board
        self._barrier = barrier

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        values = self._exchange(value)
        self._receive(values)
        return values

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        values = self._exchange(value)
        if self.rank:
            return []
        self._receive(values)
        return values

    def broadcast(self, value: JsonValue) -> JsonValue:
        values = self._exchange(value)
        self._receive(values[:1])
        return values[0]

    def _exchange(self, value: JsonValue) -> list[JsonValue]:
        self._board[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._board)
        self._barrier.wait(timeout=60)
        return values

    def _receive(self, values: Sequence[JsonValue]) -> None:
        self.received += sum(len(json.dumps(value)) for rank, value in enumerate(values) if rank != self.rank)


def on_threads(world: int, work: Callable[[Peers], _T]) -> list[_T]:
    """`work` on each of `world` ranks at once; their results in rank order."""
    return on_peers([], world, work)


def on_peers(peers: list[ThreadPeers], world: int, work: Callable[[Peers], _T]) -> list[_T]:
    """As `on_threads`; `peers` gets the ranks."""
    board: list[JsonValue] = [None] * world
    barrier = threading.Barrier(world)
    peers += [ThreadPeers(rank, board, barrier) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, peers))


def gather(rank: int, world: int) -> list[object]:
    """Values of very different lengths, twice."""
    peers = GlooPeers(dist.new_group(backend="gloo"))
    mine: JsonValue = {"rank": rank, "text": "ä" * (10 ** (2 * rank))}
    first = peers.all_gather(mine)
    second = peers.all_gather(None if rank else [1.5, True])
    return [first, second, peers.gather_to_first(mine), peers.broadcast(rank), peers.broadcast(mine)]


def save_and_fail_and_save(rank: int, world: int, uri: str) -> list[str]:
    """Step 10 cut as ZeRO-3 does; step 20 fails on the last rank; step 30 cut as ZeRO-1 does."""
    store = open_store(uri)
    peers = GlooPeers(dist.new_group(backend="gloo"))
    attempt = Attempt(store, 1)
    saver = Saver(store, attempt, peers)
    saver.begin(10, cut_each(random_state(10), world, rank), SHAPES, {"rank": rank})
    outcomes = [saver.commit()]
    failing = Saver(_Full(Path(uri)) if rank == world - 1 else store, attempt, peers)
    failing.begin(20, cut_each(random_state(20), world, rank), SHAPES, {})
    outcomes.append(failing.commit())
    saver.begin(30, cut(random_state(30), (100, 1200), rank), SHAPES, {"rank": rank})
    outcomes.append(saver.commit())
    return [_show(outcome) for outcome in outcomes]


def load_at(rank: int, world: int, uri: str) -> tuple[int, list[str], bool]:
    """The newest good step, what was passed over, and whether this rank's equal share of it is right."""
    store = open_store(uri)
    good = find_newest_good(store, GlooPeers(dist.new_group(backend="gloo")))
    assert good is not None
    step = good.manifest.step
    with CheckpointReader(store, good.manifest) as reader:
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
    saver.wait_for_all(lambda sent: None)
    if rank == world - 1:
        return "left"
    try:
        saver.commit()
    except RuntimeError as error:
        return f"raised: {type(error).__name__}"
    return "committed"


def _show(outcome: CommittedSave | FailedSave) -> str:
    match outcome:
        case CommittedSave():
            return f"committed {outcome.step}"
        case FailedSave():
            return f"failed {outcome.step}: {outcome.reason}"


class _Full(LocalStore):
    """A folder without room."""

    def put_buffers(self, key: str, buffers: Sequence[memoryview], sent: object = None) -> None:
        raise OutOfSpace.for_uri(f"{self.uri}/{key}", "quota")
