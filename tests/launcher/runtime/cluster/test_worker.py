"""How a rank's part ends: mistakes end the run, all else goes to the policy. And its line to the driver."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NoGoodCheckpoint, Superseded
from checkpoints.gather import SingleRank
from data_service.errors import CorpusError, CorruptBlock, PlanError, TokenizerError
from data_service.store.errors import AccessDenied, CredentialsExpired, OutOfSpace, StoreUnavailable
from encoder_core.errors import ModelError, TrainingError
from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import RankGroup
from encoder_core.train.groups import GroupsAborted, ensure_not_aborted
from encoder_core.train.weight_check import CorruptReplica
from launcher.errors import RecipeError, RunError
from launcher.runtime.cluster import worker
from launcher.runtime.cluster.orders import (
    EndedUnsaved,
    FatalError,
    RankError,
    RankOrders,
    RankOutcome,
    RestartFromEarlierState,
    RunTakenOver,
    UnfitNodes,
)
from launcher.runtime.cluster.rank_device import MIN_NCCL_VERSION_FOR_MIG, DeviceMissing, select_device
from launcher.runtime.cluster.rank_placement import Placement, Seat, SeatError, assign_seats
from launcher.runtime.cluster.rank_process import RankProcess
from launcher.runtime.cluster.worker import DriverLink, outcome_for_error
from launcher.runtime.preflight.collective import NodeReport, UnfitGroup
from launcher.runtime.preflight.findings import Finding, RankSums, WrongNumbers
from launcher.runtime.rank.microbatch_size import SmallerMicrobatch
from launcher.runtime.rank.spike_guard import Rewound

AWAY = StoreUnavailable.for_uri("s3://bucket/run", "no answer")


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))


def test_what_a_rank_tells_is_told_once_and_where_it_resumed_always() -> None:
    """A quick group may be over before the driver asks."""
    link = DriverLink(2, save_multiple=1)
    link.beat(12, "loading", 3)
    link.beat(13, "training")
    link.note("a line")
    link.record({"kind": "step", "step": 12})
    link.event("memory_failed", {"step": 12, "reason": "no memory"})
    first, second = link.talk(RankOrders()), link.talk(RankOrders(stacks=True))
    assert (first.beat.position, first.resumed, first.beat.place.node) == ((13, "training", 0), 12, "node")
    assert (first.notes, first.records) == (["a line"], [{"kind": "step", "step": 12}])
    ((kind, fields),) = first.events
    assert (kind, fields["rank"], fields["host"]) == ("memory_failed", 2, first.beat.place.host)
    assert (second.notes, second.records, second.events, second.resumed) == ([], [], [], 12)
    assert second.beat.count > first.beat.count
    assert first.stack is None
    assert "MainThread" in (second.stack or "")


def test_a_rank_ends_by_orders() -> None:
    """A pause waits for a multiple of steps after which checkpoints are taken; a stop does not."""
    saving, handing, other, stopped = (DriverLink(rank, save_multiple=4) for rank in (0, 0, 1, 1))
    for link in (saving, handing, other, stopped):
        link.beat(7, "training")
        assert (link.stop_requested(), link.end_action) == (False, None)
    saving.talk(RankOrders(pause=True))
    handing.talk(RankOrders(pause=True, hand_over=True))
    other.talk(RankOrders(pause=True, hand_over=True))
    stopped.talk(RankOrders(pause=True, hand_over=True))
    stopped.talk(RankOrders(stop=True))
    assert [link.stop_requested() for link in (saving, handing, other, stopped)] == [
        False,
        False,
        False,
        True,
    ]
    for link in (saving, handing, other):
        link.beat(8, "training")
    assert [link.stop_requested() for link in (saving, handing, other)] == [True, True, False]
    assert [link.end_action for link in (saving, handing, other, stopped)] == [
        "save",
        "hand over",
        "hand over",
        "save",
    ]


def test_orders_for_another_group_are_nobodys() -> None:
    process = RankProcess()
    assert process.talk(1, RankOrders(stop=True)) is None, "before it has joined one"
    link = DriverLink(0, save_multiple=1)
    process._rank = SimpleNamespace(group=2, link=link)  # type: ignore[assignment]
    assert process.talk(1, RankOrders(stop=True)) is None
    assert not link.stop_requested()
    assert process.talk(2, RankOrders(stop=True)) is not None
    assert link.stop_requested()


def told(
    error: BaseException, *, stopped: bool = False, doing: str = "training", rank: int = 3
) -> tuple[RankOutcome, list[str]]:
    """How a rank's part ends by this error, and what the operator is told."""
    link = DriverLink(rank, save_multiple=1)
    link.beat(7, doing)
    link.talk(RankOrders(stop=stopped))
    outcome = outcome_for_error(error, link)
    return outcome, list(link.news().notes)


@pytest.mark.parametrize(
    "kind",
    [
        RecipeError,
        RunError,
        NoGoodCheckpoint,
        CorpusError,
        PlanError,
        TokenizerError,
        ModelError,
        TrainingError,
    ],
)
def test_a_mistake_ends_the_run(kind: Any) -> None:
    assert told(kind("what", remedy="do")) == (FatalError("what", "do"), [])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AWAY, "transient"),
        (CredentialsExpired.for_uri("s3://bucket", "old"), "transient"),
        (AccessDenied.for_uri("s3://bucket", "the metadata service is slow"), "raised"),
        (OutOfSpace.for_uri("/disk", "full"), "raised"),
        (CorruptBlock("a block", remedy="-"), "raised"),
        (DamagedCheckpoint("a chunk", remedy="-"), "raised"),
        (CheckpointError("the final save", remedy="-"), "raised"),
        (ValueError("bad row"), "raised"),
        (RuntimeError("CUDA error: an illegal memory access"), "raised"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), "silent"),
        (DistNetworkError("recvValue failed"), "silent"),
        (ray.exceptions.ActorDiedError(), "silent"),
        (ray.exceptions.WorkerCrashedError(), "silent"),
        (SystemExit(1), "silent"),
    ],
)
def test_all_else_is_for_the_policy(error: BaseException, kind: str) -> None:
    outcome, notes = told(error)
    assert isinstance(outcome, RankError)
    assert (outcome.kind, outcome.blamed, notes) == (kind, None, [])
    assert outcome.text.startswith(type(error).__name__)
    assert type(error).__name__ in outcome.trace


def test_what_is_nobodys_failure() -> None:
    report = NodeReport("n", "h", 0.1, (Finding("/dev/shm", "failure", "64 MiB", "more"),), {})
    unfit, _ = told(UnfitGroup([report]))
    assert isinstance(unfit, UnfitNodes)
    assert ([one["node"] for one in unfit.preflights], unfit.remedy) == (["n"], "more")
    assert told(Superseded("a newer one", remedy="-")) == (RunTakenOver("a newer one"), [])
    assert told(Rewound("back")) == (RestartFromEarlierState(), [])
    assert told(Rewound("back"), rank=0) == (RestartFromEarlierState(), ["back"])
    assert told(SmallerMicrobatch("half")) == (RestartFromEarlierState(), ["half"])


def test_who_found_the_weights_of_another_wrong_is_not_blamed() -> None:
    error = CorruptReplica(7, (1,), "a.weight")
    outcome, _ = told(error)
    assert isinstance(outcome, RankError)
    assert (outcome.text, outcome.blamed) == (str(error), (1,))


@pytest.mark.parametrize("error", [CheckpointError("not saved", remedy="-"), AWAY])
def test_a_last_save_that_fails_ends_in_good_order_if_a_stop_was_asked_for(error: Any) -> None:
    assert told(error, stopped=True, doing="saving")[0] == EndedUnsaved(error.problem)
    assert isinstance(told(error, stopped=True, doing="training")[0], RankError)
    assert isinstance(told(error, stopped=False, doing="saving")[0], RankError)


@pytest.mark.parametrize("error", [TrainingError("not finite", remedy="-"), RuntimeError("any"), GroupsAborted()])
def test_a_rank_that_was_freed_because_another_is_gone_is_not_at_fault(error: Exception) -> None:
    """Whatever it raises: it may have computed with garbage."""
    link = DriverLink(0, save_multiple=1)
    link.talk(RankOrders(abort=True))
    outcome = outcome_for_error(error, link)
    assert isinstance(outcome, RankError)
    assert outcome.kind == "silent"
    with pytest.raises(GroupsAborted):
        RankGroup(0, 1, None).gather_rows([1.0])
    leave_groups()
    assert RankGroup(0, 1, None).gather_rows([1.0]).item() == 1


def test_a_late_order_frees_nobody_from_the_next_group() -> None:
    link = DriverLink(0, save_multiple=1)
    leave_groups()
    link.talk(RankOrders(abort=True))
    ensure_not_aborted()


def seats_of(*gpus: str) -> list[Seat]:
    """The seats of ranks on one node, each with one of these GPUs."""
    return assign_seats([Placement("a", "10.0.0.1", number, (gpu,)) for number, gpu in enumerate(gpus)], 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were set, by a CUDA that shows two."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    return devices


def test_a_rank_takes_its_own_of_its_nodes_devices(cuda: list[int]) -> None:
    for seat in seats_of("2", "7"):
        select_device(seat)
    assert cuda == [0, 1]


@pytest.mark.parametrize("gpus", [("0",), ("0", "1", "2"), ("GPU-1",)])
def test_a_device_that_cuda_does_not_show_is_missed_before_another_is_taken(
    gpus: tuple[str, ...], cuda: list[int]
) -> None:
    """It may have fallen out, so the failure policy judges it, as it does any failure of a node."""
    with pytest.raises(DeviceMissing) as raised:
        select_device(seats_of(*gpus)[0])
    assert cuda == []
    assert ",".join(gpus) in str(raised.value)
    assert isinstance(told(raised.value)[0], RankError)


def test_instances_of_one_machine_need_an_nccl_that_connects_them(
    cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    select_device(seats_of("MIG-1")[0])
    two = seats_of("MIG-1", "MIG-2")
    with pytest.raises(SeatError) as raised:
        select_device(two[1])
    assert isinstance(told(raised.value)[0], FatalError)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: MIN_NCCL_VERSION_FOR_MIG)
    select_device(two[1])
    assert cuda == [0, 0]


def test_a_group_sums_once_its_nodes_are_fit_and_a_wrong_sum_makes_them_unfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node with too little shared memory would make NCCL hang."""
    wrong = RankSums(WrongNumbers(1, 7, "2.0", 1.0), None, None, None)
    right, ill = RankSums(None, None, None, None), Finding("/dev/shm", "failure", "64 MiB", "more")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for findings, summed, unfit in (((), [right], 0), ((), [wrong], 1), ((ill,), [], 1)):
        sums, place = list(summed), list[object]()
        link = DriverLink(0, save_multiple=1)

        def sum_up(peers: Any, sums: Any = sums, place: Any = place, link: Any = link) -> list[RankSums]:
            place.append(link._where)
            return [sums.pop()]

        monkeypatch.setattr(worker, "preflight", lambda *_, f=findings: [NodeReport("n", "h", 0.1, f, {})])
        monkeypatch.setattr(worker, "first_sums", sum_up)
        assignment: Any = SimpleNamespace(recipe=None, run_uri="run")
        with pytest.raises(UnfitGroup) if unfit else nullcontext():
            reports = worker.run_preflight(assignment, link, SingleRank(), ["n"])  # type: ignore[arg-type]
            assert [f.what for f in reports[0].findings] == ["sums"]
            assert link._where == (0, "starting", 0)
        assert sums == []
        assert place == [(0, "in the first NCCL sum", 0)] * len(summed)
