"""Stand-ins for a trainer: parameters with optimizer state, cut among ranks as ZeRO would cut them."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor

from checkpoints.attempt import Attempt
from checkpoints.commit import Committed, Outcome
from checkpoints.gather import Alone, Peers
from checkpoints.layout import CheckpointManifest
from checkpoints.load import Reader
from checkpoints.save import Saver
from data_service.store.base import Store
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
    return {
        name: {kind: torch.randn(size, generator=generator) for kind in KINDS} for name, size in sizes.items()
    }


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


def save(saver: Saver, step: int, seed: int) -> Outcome:
    """Saves `random_state(seed)` as the only rank."""
    saver.begin(step, cut(random_state(seed), (), 0), SHAPES, {"step": step, "seed": seed})
    return saver.commit()


def commit_steps(
    store: Store, attempt: Attempt, *steps: int, resumed: CheckpointManifest | None = None
) -> None:
    """Commits a checkpoint at each step, with the step as its seed, as the only rank."""
    saver = Saver(store, attempt, Alone(), resumed=resumed)
    for step in steps:
        assert isinstance(save(saver, step, step), Committed)
    saver.close()


def assert_holds(store: Store, manifest: CheckpointManifest, state: State) -> None:
    """The checkpoint, read parameter by parameter, is `state` bit for bit."""
    with Reader(store, manifest) as reader:
        for name, kinds in state.items():
            for kind, tensor in kinds.items():
                found = reader.read_full(name, kind)
                assert tuple(found.shape) == manifest.shapes[name]
                assert torch.equal(found.flatten(), tensor), (name, kind)


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

    def from_first(self, value: JsonValue) -> JsonValue:
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
