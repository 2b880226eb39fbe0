"""What every rank runs in its process of Ray: joins the group, keeps a line to the monitor, and trains."""

import os
import threading
import traceback
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from checkpoints.attempt import Attempt
from checkpoints.gather import GlooPeers
from data_service.client import FeedClient
from data_service.errors import UserError as DataError
from data_service.gauges import StoreRetries
from data_service.store.errors import StoreUnavailable
from encoder_core.errors import UserError as ModelError
from encoder_core.train.control import Control
from encoder_core.train.replicas import CorruptReplica
from launcher.monitor import Orders
from launcher.preflight.measure import Subject
from launcher.preflight.nodes import Report, Unfit, preflight, problem, unfit, warnings
from launcher.rank import run_rank
from launcher.rank_group import Assignment, Seat
from launcher.rewind import Rewound
from launcher.runs import open_run
from launcher.startup import Startup
from launcher.watchdog import Place, stack_of_every_thread

BEAT_S = 1.0
_COLLECTIVE = timedelta(minutes=30)  # for one; the watchdog is sooner
_ERROR_LENGTH = 500  # characters of an error by which failures are compared


def train_rank(seat: Seat, assignment: Assignment) -> None:
    """A rank's life. A mistake no restart can cure is reported to the monitor before it ends the group."""
    startup = Startup()
    link = RayLink(assignment.monitor, seat.rank, assignment.grid)
    try:
        _join(seat)
        _train(assignment, link, startup)
    except (StoreUnavailable, Unfit):
        raise  # a store may come back, and there may be other nodes: let the group be restarted
    except (DataError, ModelError) as error:
        ray.get(assignment.monitor.fail.remote(error.problem, error.remedy, link.attempt))
        raise
    except Rewound as rewound:
        ray.get(assignment.monitor.went_back.remote(link.attempt))
        if link.rank == 0:
            link.note(str(rewound))
        raise
    except CorruptReplica as error:  # all ranks raise it, and those that are well must not be blamed
        ray.get(assignment.monitor.failed.remote(link.rank, str(error), error.ranks, link.attempt))
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
        ray.get(assignment.monitor.failed.remote(link.rank, text, None, link.attempt))
        where = ray.get_runtime_context().get_node_id()
        link.note(f"rank {link.rank} failed on node {where[:8]}:\n{traceback.format_exc()}")
        raise
    finally:
        link.close()


def _join(seat: Seat) -> None:
    """Meet the other ranks."""
    if seat.gpus:
        torch.cuda.set_device(seat.local_rank)
    dist.init_process_group(
        "nccl" if seat.gpus else "gloo",
        init_method="env://",
        rank=seat.rank,
        world_size=seat.world,
        timeout=_COLLECTIVE,
    )


def _train(assignment: Assignment, link: "RayLink", startup: Startup) -> None:
    control = Control.join()
    group = dist.new_group(backend="gloo")
    peers = GlooPeers(group)
    nodes = [str(node) for node in peers.all_gather(here().node)]
    startup.done("group")
    reports = preflight(Subject(assignment.recipe, assignment.run_uri), peers, group, nodes)
    _ensure_fit(assignment.monitor, reports, peers)
    startup.done("preflight")
    entering = assignment.monitor.enter.remote(nodes, warnings(reports)) if peers.rank == 0 else None
    granted = ray.get(entering) if entering is not None else None
    number = peers.all_gather(granted)[0]
    if not isinstance(number, int):
        return  # the monitor refused: the driver knows why
    link.attempt = number
    run = open_run(assignment.run_uri)
    attempt = Attempt(run.store, number)
    state = run_rank(
        run, attempt, control, peers, lambda spec: FeedClient(assignment.feed, spec), link, startup, reports
    )
    if peers.rank == 0:
        ray.get(assignment.monitor.finish.remote(state.step, number))


def _ensure_fit(monitor: Any, reports: list[Report], peers: GlooPeers) -> None:
    """Collective. Raises Unfit once the monitor knows which nodes are."""
    bad = unfit(reports)
    if not bad:
        return
    text, remedy = problem(bad)
    if peers.rank == 0:
        ray.get(monitor.unfit.remote([report.event() for report in bad], text, remedy))
    peers.all_gather(None)  # nobody ends the group before that
    raise Unfit(text)


def here() -> Place:
    """This process, in a Ray worker."""
    return Place(ray.get_runtime_context().get_node_id(), os.getpid())


class RayLink:
    """A rank's line to the monitor. A thread beats, so that a rank deep in a collective still shows where it is.

    Attributes:
        attempt: the number of the attempt that the rank is part of; None until it knows.
    """

    def __init__(self, monitor: Any, rank: int, grid: int) -> None:
        self._monitor, self.rank, self._grid = monitor, rank, grid
        self.attempt: int | None = None
        self._where = (0, "starting")
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._closed = threading.Event()
        self._retries = StoreRetries()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def beat(self, step: int, doing: str) -> None:
        self._where = (step, doing)

    def record(self, record: dict[str, Any]) -> None:
        self._monitor.record.remote(record, self.attempt)

    def note(self, text: str) -> None:
        self._monitor.note.remote(text)

    def stop_requested(self) -> bool:
        return self._stop.is_set() or (self._pause.is_set() and self._where[0] % self._grid == 0)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        place = here()
        while not self._closed.wait(BEAT_S):
            self._retries.update()
            orders: Orders = ray.get(self._monitor.beat.remote(self.rank, *self._where, place, self.attempt))
            if orders.stop:
                self._stop.set()
            if orders.pause:
                self._pause.set()
            if orders.stacks:
                self._monitor.stack.remote(self.rank, stack_of_every_thread())
