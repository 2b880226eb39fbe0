"""The function that every rank runs in its Ray process: it joins the group, connects to the coordinator, and trains."""

import gc
import os
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, NewerFormat, NoGoodCheckpoint, Superseded
from checkpoints.gloo_peers import GROUP_TIMEOUT, GlooPeers
from data_service.errors import CorpusError, CorruptBlock, InputError, PlanError, TokenizerError
from data_service.samples.spec import StreamSpec
from data_service.service.client import FeedClient
from data_service.store.errors import TRANSIENT, StoreError
from encoder_core.errors import ModelError, TrainingError
from encoder_core.layers.torch_internals import nccl_backends
from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import Control
from encoder_core.train.weight_check import CorruptReplica
from launcher.errors import PEER_GONE, RecipeError, RunError
from launcher.runtime.cluster.assignment import Assignment
from launcher.runtime.cluster.memory_keeper import NodeMemory
from launcher.runtime.cluster.orders import CoordinatorLost
from launcher.runtime.cluster.rank_link import RayLink, here
from launcher.runtime.cluster.rank_placement import Seat, SeatError
from launcher.runtime.policies.failures import Kind
from launcher.runtime.policies.watchdog import FIRST_SUMS, Watchdog
from launcher.runtime.preflight.collective import (
    NodeReport,
    Unfit,
    first_sums,
    preflight,
    problem,
    unfit,
    warnings,
    with_sums,
)
from launcher.runtime.preflight.measure import PreflightSubject
from launcher.runtime.preflight.network import variables as network_variables
from launcher.runtime.rank.main import run_rank
from launcher.runtime.rank.microbatch_size import SmallerMicrobatch
from launcher.runtime.rank.spike_guard import Rewound
from launcher.runtime.rank.startup import Startup
from launcher.runtime.run.record import open_run

_LISTENS_S, _LOOK_S = 60.0, 0.01
_LATER = 1.5  # torch's time limit of a collective, in the watchdog's limit, which must come first: it names the ranks
_RETRY_S = 1.0  # interval at which ranks ask for their attempt while the store does not answer
NCCL_FOR_MIG = (2, 31)
"""The first version whose guide names MIG instances as devices of one communicator."""
_ERROR_LENGTH = 500  # number of characters of an error by which failures are compared
_MISTAKES = (
    RecipeError, RunError, NoGoodCheckpoint, NewerFormat, InputError, CorpusError, PlanError, TokenizerError,
    ModelError, TrainingError,
)  # fmt: skip
"""Errors in the inputs of a run, or damage to it: a restart does not cure them."""


def train_rank(seat: Seat, assignment: Assignment, began: float) -> None:
    """Train as one rank, and leave its groups, so that the process can train again as a rank of another group. This
    holds if the group ended in good order, or because another rank died.

    `began`: `time.monotonic()` before the process imported anything.

    Raises the error that ended the rank, after the coordinator was told. Such a process must not train again.
    """
    gc.freeze()  # what is imported stays, and need not be looked at when a group ends
    startup = Startup(assignment.before, began, assignment.processes)
    startup.done("imports")
    link = RayLink(assignment.coordinator, seat.rank, assignment.save_multiple, seat.world)
    broken = False
    try:
        _join(seat, assignment.recipe.watchdog)
        _train(assignment, link, startup)
    except BaseException as error:
        broken = True
        ended = _in_good_order(assignment.coordinator, link, error)
        if not ended and not (isinstance(error, Exception) and _kind_of(error, link) == "silent"):
            traceback.clear_frames(
                error.__traceback__
            )  # they hold the groups: the others wait until these are left
            _leave(broken)
            raise
    finally:
        link.close()
    _leave(broken)


def _leave(broken: bool) -> None:
    """Leave the process groups, and give back the memory of the engine that trained. Raises RuntimeError if the GPU
    has failed, so that this process cannot use it again. `broken`: as in `leave_groups`."""
    leave_groups(broken=broken)
    gc.collect()  # models and engines are full of cycles
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _join(seat: Seat, limits: Watchdog) -> None:
    """Connect to the other ranks, over the network of the address under which Ray knows this node."""
    os.environ.update(network_variables(ray.util.get_node_ip_address(), os.environ))
    take_device(seat)
    _await_first(seat)
    dist.init_process_group(
        "nccl" if seat.gpus else "gloo",
        init_method="env://",
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=_LATER * max(limits.step, limits.other)),
    )
    nccl_backends()  # raises now if they cannot be aborted later


def _await_first(seat: Seat) -> None:
    """Wait until rank 0 listens, or a minute is over. If torch finds that it does not, it tries again only after half a
    second, which is most of what a restart takes."""
    deadline = time.monotonic() + _LISTENS_S
    while seat.rank and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(seat.master, timeout=_LISTENS_S):
            return
        time.sleep(_LOOK_S)


class DeviceMissing(Exception):
    """The error if CUDA does not show a rank the GPUs of its seat."""


def take_device(seat: Seat) -> None:
    """Make the rank's GPU the device of this process.

    Raises:
        DeviceMissing: if CUDA shows another number of GPUs than the seat has. A GPU may have failed, so the ranks can
            start on another node.
        SeatError: if this version of NCCL does not connect MIG instances of one machine.
    """
    if not seat.gpus:
        return
    if seat.shares_a_gpu and seat.local_world > 1 and (nccl := _nccl()) < NCCL_FOR_MIG:
        raise SeatError(
            f"{seat.local_world} ranks have MIG instances of one machine, which NCCL {_dotted(nccl)} does not connect",
            remedy="start one rank on each machine, or use whole GPUs, or install a torch with NCCL "
            f"{_dotted(NCCL_FOR_MIG)} or later",
        )
    found = torch.cuda.device_count()
    if found != len(seat.visible):
        raise DeviceMissing(
            f"CUDA shows rank {seat.rank} {found} GPU(s) of CUDA_VISIBLE_DEVICES={','.join(seat.visible)}: see whether "
            "one has failed (nvidia-smi). If MIG divides the GPUs, set the variable to MIG instances before Ray starts"
        )
    torch.cuda.set_device(seat.device)


def _nccl() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _in_good_order(coordinator: Any, link: RayLink, error: BaseException) -> bool:
    """Tell the coordinator of a rank's error. Return whether the rank nevertheless ended as requested."""
    match error:
        case Unfit():  # the coordinator knows it already, and may choose other nodes
            return False
        case _ if link.peer_gone:
            _tell_failure(coordinator, link, error)
        case Superseded():
            ray.get(coordinator.superseded.remote(error.problem, link.attempt))
        case CheckpointError() | StoreError() if link.ending:  # the last commit stands
            ray.get(coordinator.unsaved.remote(error.problem, link.attempt))
            return True
        case CorruptBlock():  # perhaps only on this machine; if the data are damaged, the failure repeats itself
            _tell_failure(coordinator, link, error)
        case _ if isinstance(error, _MISTAKES):
            ray.get(coordinator.fail.remote(error.problem, error.remedy, link.attempt))
        case Rewound():
            ray.get(coordinator.went_back.remote(link.attempt))
            if link.rank == 0:
                link.note(str(error))
        case SmallerMicrobatch():  # on the rank whose memory gave out
            ray.get(coordinator.went_back.remote(link.attempt))
            link.note(str(error))
        case _:
            _tell_failure(coordinator, link, error)
    return False


def _tell_failure(coordinator: Any, link: RayLink, error: BaseException) -> None:
    """Report a failure to the coordinator, whose failure policy decides what follows. CorruptReplica is raised by all
    ranks, though most of them are intact, so it names the ranks at fault."""
    blamed = error.ranks if isinstance(error, CorruptReplica) else None
    name = "" if isinstance(error, CorruptReplica) else f"{type(error).__name__}: "
    text = f"{name}{error}"[:_ERROR_LENGTH]
    trace = "".join(traceback.format_exception(error))
    ray.get(coordinator.failed.remote(link.rank, text, blamed, link.attempt, _kind_of(error, link), trace))


def _kind_of(error: BaseException, link: RayLink) -> Kind:
    if link.peer_gone:  # what the rank then computed is garbage, and so may be its error
        return "silent"
    if isinstance(error, TRANSIENT):
        return "transient"
    if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
        return "silent"  # an actor or a data worker is gone
    lost = isinstance(error, CoordinatorLost | dist.DistNetworkError) or not isinstance(error, Exception)
    gone = isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE)
    return "silent" if lost or gone else "raised"


def _train(assignment: Assignment, link: RayLink, startup: Startup) -> None:
    control = Control.join()
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    peers = GlooPeers(group)
    nodes = [str(node) for node in peers.all_gather(here().node)]
    startup.done("group")
    reports = _examine(assignment, link, peers, nodes)
    startup.done("preflight")
    number = _enter(assignment.coordinator, link, peers, nodes, warnings(reports))
    if number is None:
        return  # the coordinator refused: the driver knows why
    link.attempt = number
    run = replace(open_run(assignment.run_uri), wanted=assignment.removals)
    attempt = Attempt(run.store, number)

    def open_stream(spec: StreamSpec) -> FeedClient:
        client = FeedClient(assignment.feed, spec, lambda blocks: link.beat(0, "counting", blocks))
        for note in client.notes if peers.rank == 0 else ():
            link.note(note)
        return client

    memory = None
    if assignment.keepers:
        memory = NodeMemory(
            assignment.keepers, nodes, peers.rank, attempt=number, remembers=assignment.remembers
        )
    state = run_rank(run, attempt, control, peers, open_stream, link, startup, reports, memory)
    if peers.rank == 0:
        ray.get(assignment.coordinator.finish.remote(state.step, number, saved=not link.handed_over))


def _examine(
    assignment: Assignment, link: RayLink, peers: GlooPeers, nodes: Sequence[str]
) -> list[NodeReport]:
    """Run the preflight of the nodes, then the trial sums of the group. Collective. Raises Unfit if a node must not
    train. A rank that does not reach the sums still reports "starting", by which the watchdog finds it."""
    reports = preflight(PreflightSubject(assignment.recipe, assignment.run_uri), peers, nodes)
    _ensure_fit(assignment.coordinator, reports, peers)
    link.beat(0, FIRST_SUMS[dist.get_backend()])
    reports = with_sums(reports, first_sums(peers), nodes)
    link.beat(0, "starting")
    _ensure_fit(assignment.coordinator, reports, peers)
    return reports


def _enter(
    coordinator: Any, link: RayLink, peers: GlooPeers, nodes: list[str], told: list[str]
) -> int | None:
    """Return the number of the group's attempt; None if the group must not train. Wait while the store does not answer.
    Collective."""
    tries = 0
    while True:
        granted = ray.get(coordinator.enter.remote(nodes, told)) if peers.rank == 0 else None
        answer = peers.all_gather(granted)[0]
        if not isinstance(answer, str):
            return answer if isinstance(answer, int) else None
        tries += 1
        link.beat(0, "waiting for the store", tries)
        time.sleep(_RETRY_S)


def _ensure_fit(coordinator: Any, reports: list[NodeReport], peers: GlooPeers) -> None:
    """Raise Unfit if a node failed its preflight, after telling the coordinator which. Collective."""
    bad = unfit(reports)
    if not bad:
        return
    text, remedy = problem(bad)
    if peers.rank == 0:
        ray.get(coordinator.unfit.remote([report.event() for report in bad], text, remedy))
    peers.all_gather(None)  # so that no rank ends the group before the coordinator knows
    raise Unfit(text)
