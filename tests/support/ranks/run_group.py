"""A run's ranks as plain processes, without Ray: what `launcher.runtime.cluster.worker` does, on gloo and an
in-process stream.

A group of them starts together, some told to kill themselves at a step.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.ranks.forked import forked
from tests.support.ranks.small_memory import Memory, small_memory

if TYPE_CHECKING:
    from launcher.runtime.rank.journal import EndAction
    from launcher.runtime.run.record import Run
    from tests.support.ranks.bad_kernels import Misbehaviour

KILLED = -signal.SIGKILL
_SOON_S = 10.0
FLIPPED = "encoder.embeddings.norm.bias"  # the weight of which `flip` turns a bit over


@dataclass(frozen=True)
class Ended:
    """How a group of ranks ended: exit codes in rank order, and what they printed."""

    codes: list[int]
    output: str


def run_group(
    run: str,
    world: int,
    *,
    kill: dict[int, int] | None = None,
    stop_at: int | None = None,
    flip: tuple[int, int] | None = None,
    slow: int | None = None,
    wrong: Sequence[tuple[int, int]] = (),
    deadly: Sequence[tuple[int, int]] = (),
    kernel: "str | Misbehaviour | None" = None,
    compiler: "Misbehaviour | None" = None,
    memory: Memory | None = None,
    without_removed: bool = False,
    kill_after: tuple[int, float] | None = None,
    full: int | None = None,
    timeout: float = 240,
) -> Ended:
    """Start `world` ranks on a new attempt and wait for all. `kill` maps a rank to the step at which it dies by
    SIGKILL; `stop_at` asks for a clean stop at a step; `flip` is a rank, and the step before which one bit of its
    weights is turned over; the rank `slow` is, from the first commit on; `wrong` and `deadly` are samples (`poison`);
    with `kernel`, ranks take their CPU for a GPU one of whose kernels is so (`bad_kernels`), with `memory` for one with
    little memory (`small_memory`); the `compiler` may misbehave, too. `without_removed` as of `train`. `kill_after` is
    a rank, and the seconds after which it dies by SIGKILL, wherever it is; the others soon after it, as the driver ends
    a group. With `full`, ranks copy their state to memory, and at `stop_at` are to hand it over; the memory of this
    rank is full then.
    When one rank dies by itself, the others end by error. Ranks that go back start again."""
    with tempfile.TemporaryDirectory() as meeting:
        logs = [Path(meeting, f"rank{rank}.log") for rank in range(world)]
        shared = {
            "run": run,
            "world": world,
            "meeting": f"{meeting}/meet",
            "stop_at": stop_at,
            "wrong": wrong,
            "deadly": deadly,
            "kernel": kernel,
            "compiler": compiler,
            "memory": memory,
            "without_removed": without_removed,
            "full": full,
        }
        kills, flips = kill or {}, dict([flip] if flip else [])
        ranks = [
            forked(
                _rank,
                shared | {"rank": rank, "kill_at": kills.get(rank), "flip_at": flips.get(rank)},
                output=logs[rank],
            )
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        if slow is not None:
            threading.Thread(target=_slow_down, args=(ranks[slow], run), daemon=True).start()
        if kill_after is not None:
            threading.Timer(kill_after[1], _end_group, (ranks, kill_after[0])).start()
        wait_all(ranks, timeout)
        output = "\n".join(log.read_text() for log in logs if log.exists())
    return Ended([rank.exitcode or 0 for rank in ranks], output)


def finish(run: str, world: int, **orders: Any) -> str:
    """The run, on to its end or a stop that was asked for; fails where a rank does. Orders as of `run_group`."""
    ended = run_group(run, world, **orders)
    assert ended.codes == [0] * world, ended.output
    return run


def wait_all(ranks: Sequence[BaseProcess], timeout: float) -> None:
    """Until all have ended; after `timeout` seconds they are killed, and it is an error."""
    end = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
        rank.join()
    if late:
        raise TimeoutError(f"{len(late)} of {len(ranks)} ranks had not ended after {timeout:.0f} s")


def _end_group(ranks: Sequence[BaseProcess], first: int) -> None:
    """Kill a rank, and those that have not ended by themselves soon after, such as one that waits to meet it."""
    ranks[first].kill()
    end = time.monotonic() + _SOON_S
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        rank.kill()


def _slow_down(rank: BaseProcess, run: str) -> None:
    """A process that gets a quarter of its time, as on a machine that others use or that is too hot."""
    from checkpoints.listing import list_committed
    from data_service.store.open import open_store

    assert rank.pid is not None
    tick = threading.Event()
    while not list(list_committed(open_store(run))) and psutil.pid_exists(rank.pid):
        tick.wait(0.1)
    with suppress(ProcessLookupError):
        while True:
            os.kill(rank.pid, signal.SIGSTOP)
            tick.wait(0.03)
            os.kill(rank.pid, signal.SIGCONT)
            tick.wait(0.01)


class ProcessLink:
    """A rank's line to nobody, with its orders. `hands_over`: whether it leaves its last state to others, in memory."""

    def __init__(
        self, kill_at: int | None, stop_at: int | None, flip_at: int | None, *, hands_over: bool = False
    ) -> None:
        self._hands_over = hands_over
        self._kill_at, self._stop_at, self._flip_at, self._step = kill_at, stop_at, flip_at, 0

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        new, self._step = step != self._step, step
        if doing == "training" and step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if new and doing == "training" and step == self._flip_at:
            flip_a_bit()

    def record(self, record: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        print(kind, fields)

    def stop_requested(self) -> bool:
        return self._step == self._stop_at

    @property
    def end_action(self) -> "EndAction | None":
        if not self.stop_requested():
            return None
        return "hand over" if self._hands_over else "save"


def flip_a_bit() -> None:
    """In the working weights of this process's engine, wherever it is: one of a million, as a particle would."""
    import gc

    import torch

    from encoder_core.train.engine import Engine

    engines = (thing for thing in gc.get_objects() if type(thing) is Engine)  # that of a probe may be among them
    (named,) = (named for named in (dict(engine.replicated.named) for engine in engines) if FLIPPED in named)
    weight = named[FLIPPED].detach().view(-1)
    bits = weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])
    bits[5] ^= 1 << 3


def _opened(uri: str, without_removed: bool) -> "Run":
    from datetime import UTC, datetime

    from launcher.runtime.run.create import reconcile
    from launcher.runtime.run.record import open_run

    run, now = open_run(uri), datetime.now(UTC)
    if not without_removed:
        return run
    return reconcile(run, recipe=None, accept_changes=False, now=now, without_removed=True)


def _rank(orders: dict[str, Any]) -> None:
    rank, world = str(orders["rank"]), str(orders["world"])
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    import torch.distributed as dist

    from checkpoints.attempt import Attempt, claim
    from checkpoints.gloo_peers import GlooPeers
    from encoder_core.train.engine import leave_groups
    from encoder_core.train.exchange import RankGroup
    from launcher.runtime.rank.main import run_rank
    from launcher.runtime.rank.spike_guard import Rewound
    from launcher.runtime.rank.startup import StartupClock
    from tests.support.ranks.bad_kernels import bad_kernel
    from tests.support.ranks.bad_samples import deadly_input, poisoned
    from tests.support.ranks.full_node import Node

    run = _opened(orders["run"], orders["without_removed"])
    hands_over = orders["full"] is not None
    link = ProcessLink(orders["kill_at"], orders["stop_at"], orders["flip_at"], hands_over=hands_over)
    node = Node(link, full=orders["full"] == orders["rank"]) if hands_over else None
    open_stream = poisoned(orders["wrong"], orders["deadly"])
    for times in count():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{orders['meeting']}{times}",
            rank=orders["rank"],
            world_size=orders["world"],
        )
        control = RankGroup.join()
        peers = GlooPeers(dist.new_group(backend="gloo"))
        claimed = claim(run.store).number if orders["rank"] == 0 else None
        number = peers.all_gather(claimed)[0]
        assert isinstance(number, int)
        try:
            bad = bad_kernel(orders["kernel"], orders["compiler"])
            with deadly_input(), bad, small_memory(orders["memory"], orders["rank"]):
                state = run_rank(
                    run,
                    Attempt(run.store, number),
                    control,
                    peers,
                    open_stream,
                    link,
                    StartupClock(),
                    (),
                    node,
                )
            break
        except Rewound as rewound:
            print(rewound)
        leave_groups(broken=True)  # as the actor of a rank does before it joins the next group
    print(f"rank {orders['rank']} ended at step {state.step}")
    dist.destroy_process_group()
