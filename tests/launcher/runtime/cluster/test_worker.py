"""How a rank's end is told: mistakes end the run, all else goes to the policy. The coordinator is a list of calls."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NoGoodCheckpoint, Superseded
from checkpoints.gather import Alone
from data_service.errors import CorpusError, CorruptBlock, PlanError, TokenizerError
from data_service.store.errors import AccessDenied, CredentialsExpired, OutOfSpace, StoreUnavailable
from encoder_core.errors import ModelError, TrainingError
from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import Control
from encoder_core.train.groups import GroupsAborted, ensure_whole
from encoder_core.train.weight_check import CorruptReplica
from launcher.errors import RecipeError, RunError
from launcher.runtime.cluster import rank_link, worker
from launcher.runtime.cluster.orders import CoordinatorLost, Orders
from launcher.runtime.cluster.rank_link import RayLink
from launcher.runtime.cluster.rank_placement import Placement, Seat, SeatError, seats
from launcher.runtime.cluster.worker import NCCL_FOR_MIG, DeviceMissing, take_device
from launcher.runtime.policies.watchdog import RankLocation
from launcher.runtime.preflight.collective import NodeReport, Unfit
from launcher.runtime.preflight.findings import Finding, RankSums, Wrong
from launcher.runtime.rank.microbatch_size import SmallerMicrobatch
from launcher.runtime.rank.spike_guard import Rewound

AWAY = StoreUnavailable.at("s3://bucket/run", "no answer")


class Coordinator:
    """Every call is kept, and answered with what `answers` has for it."""

    def __init__(self, **answers: list[Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return _Method(name, self.calls, self._answers.get(name, []))


class _Method:
    def __init__(self, name: str, calls: list[tuple[Any, ...]], answers: list[Any]) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def remote(self, *given: Any) -> Any:
        self._calls.append((self._name, *given))
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(rank_link, "here", lambda: RankLocation("node", 1, "host"))
    monkeypatch.setattr(rank_link, "beat_interval", lambda ranks: 0.001)
    monkeypatch.setattr(worker, "_RETRY_S", 0.001)


def test_where_a_group_resumes_is_told_though_no_heartbeat_falls_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By that step it is known whether groups that die get any further."""
    monkeypatch.setattr(rank_link, "beat_interval", lambda ranks: 60.0)
    coordinator = Coordinator()
    link = RayLink(coordinator, 0, save_multiple=1)
    link.attempt = 5
    link.beat(12, "loading")
    link.beat(12, "loading", 3)
    link.beat(12, "training")
    link.close()
    assert [(*call[:4], *call[5:]) for call in coordinator.calls] == [("beat", 0, 12, "loading", 5, 0)]


def told(error: BaseException, *, stopped: bool = False, doing: str = "training") -> tuple[bool, list[Any]]:
    """What the coordinator hears of a rank's error, and whether the rank ends in good order."""
    coordinator = Coordinator(beat=[Orders(stop=stopped)] * 1000)
    link = RayLink(coordinator, 3, save_multiple=1)
    link.attempt = 5
    link.beat(7, doing)
    while stopped and not link.stop_requested():
        pass
    good = worker._in_good_order(coordinator, link, error)
    link.close()
    return good, [call for call in coordinator.calls if call[0] != "beat"]


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
    assert told(kind("what", remedy="do")) == (False, [("fail", "what", "do", 5)])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (AWAY, "transient"),
        (CredentialsExpired.at("s3://bucket", "old"), "transient"),
        (AccessDenied.at("s3://bucket", "the metadata service is slow"), "raised"),
        (OutOfSpace.at("/disk", "full"), "raised"),
        (CorruptBlock("a block", remedy="-"), "raised"),
        (DamagedCheckpoint("a chunk", remedy="-"), "raised"),
        (CheckpointError("the final save", remedy="-"), "raised"),
        (ValueError("bad row"), "raised"),
        (RuntimeError("CUDA error: an illegal memory access"), "raised"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), "silent"),
        (DistNetworkError("recvValue failed"), "silent"),
        (ray.exceptions.ActorDiedError(), "silent"),
        (ray.exceptions.WorkerCrashedError(), "silent"),
        (CoordinatorLost("gone"), "silent"),
        (SystemExit(1), "silent"),
    ],
)
def test_all_else_is_for_the_policy(error: BaseException, kind: str) -> None:
    good, ((name, rank, text, blamed, attempt, said, trace),) = told(error)
    assert (good, name, rank, blamed, attempt, said) == (False, "failed", 3, None, 5, kind)
    assert text.startswith(type(error).__name__)
    assert type(error).__name__ in trace


def test_what_is_nobodys_failure() -> None:
    assert told(Unfit("a full disk")) == (False, [])
    assert told(Superseded("a newer one", remedy="-")) == (False, [("superseded", "a newer one", 5)])
    assert told(Rewound("back"))[1] == [("went_back", 5)]
    assert told(SmallerMicrobatch("half"))[1][0] == ("went_back", 5)


def test_who_found_the_weights_of_another_wrong_is_not_blamed() -> None:
    error = CorruptReplica(7, (1,), "a.weight")
    assert told(error)[1][0][:5] == ("failed", 3, str(error), (1,), 5)


@pytest.mark.parametrize("error", [CheckpointError("not saved", remedy="-"), AWAY])
def test_a_last_save_that_fails_ends_in_good_order_if_a_stop_was_asked_for(error: Any) -> None:
    assert told(error, stopped=True, doing="saving") == (True, [("unsaved", error.problem, 5)])
    assert told(error, stopped=True, doing="training")[1][0][0] == "failed"
    assert told(error, stopped=False, doing="saving")[1][0][0] == "failed"


def test_ranks_wait_together_for_a_store_that_lets_nobody_claim() -> None:
    coordinator = Coordinator(enter=["no answer", "no answer", 6], beat=[Orders()] * 1000)
    link = RayLink(coordinator, 0, save_multiple=1)
    assert worker._enter(coordinator, link, Alone(), ["n"], []) == 6  # type: ignore[arg-type]
    assert link._where == (0, "waiting for the store", 2)
    link.close()
    refusing = Coordinator(enter=[None])
    assert worker._enter(refusing, link, Alone(), ["n"], []) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [TrainingError("not finite", remedy="-"), RuntimeError("any"), GroupsAborted()]
)
def test_a_rank_that_was_freed_because_another_is_gone_is_not_at_fault(error: Exception) -> None:
    """Whatever it raises: it may have computed with garbage."""
    coordinator = Coordinator(beat=[Orders(abort=True)] * 1000)
    link = RayLink(coordinator, 0, save_multiple=1)
    while not link.peer_gone:
        pass
    assert not worker._in_good_order(coordinator, link, error)
    link.close()
    (told,) = [call for call in coordinator.calls if call[0] == "failed"]
    assert told[5] == "silent"
    with pytest.raises(GroupsAborted):
        Control(0, 1, None).table([1.0])
    leave_groups()
    assert Control(0, 1, None).table([1.0]).item() == 1


def test_a_late_order_frees_nobody_from_the_next_group() -> None:
    link = RayLink(Coordinator(beat=[Orders()] * 1000), 0, save_multiple=1)
    leave_groups()
    link._coordinator = Coordinator(beat=[Orders(abort=True)] * 1000)
    while not link.peer_gone:
        pass
    link.close()
    ensure_whole()


def test_a_rank_whose_coordinator_died_ends_at_its_next_step() -> None:
    """A thread that died in silence left the rank to train on, unseen."""
    unavailable = ray.exceptions.ActorUnavailableError("back soon", None)
    beats = [unavailable, Orders(), ray.exceptions.ActorDiedError()]
    link = RayLink(Coordinator(beat=beats), 0, save_multiple=1)
    with pytest.raises(CoordinatorLost):
        _train_on(link)
    link.close()


def _train_on(link: RayLink) -> None:
    while not link.stop_requested():
        pass


def test_and_ends_itself_if_it_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(rank_link, "_GRACE_S", 0.01)
    monkeypatch.setattr(os, "_exit", codes.append)
    link = RayLink(
        Coordinator(beat=[ray.exceptions.ActorDiedError() for _ in range(10_000)]), 0, save_multiple=1
    )
    while not codes:
        pass
    assert codes[0] == 1
    link.close()


def test_a_group_sums_once_its_nodes_are_fit_and_a_wrong_sum_makes_them_unfit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node with too little shared memory would make NCCL hang."""
    wrong = RankSums(Wrong(1, 7, "2.0", 1.0), None, None, None)
    right, ill = RankSums(None, None, None, None), Finding("/dev/shm", "failure", "64 MiB", "more")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for findings, summed, unfit in (((), [right], 0), ((), [wrong], 1), ((ill,), [], 1)):
        sums, place = list(summed), list[object]()
        link = RayLink(Coordinator(beat=[Orders()] * 1000), 0, save_multiple=1)

        def sum_up(peers: Any, sums: Any = sums, place: Any = place, link: Any = link) -> list[RankSums]:
            place.append(link._where)
            return [sums.pop()]

        monkeypatch.setattr(worker, "preflight", lambda *_, f=findings: [NodeReport("n", "h", 0.1, f, {})])
        monkeypatch.setattr(worker, "first_sums", sum_up)
        assignment: Any = SimpleNamespace(recipe=None, run_uri="run", coordinator=Coordinator())
        with pytest.raises(Unfit) if unfit else nullcontext():
            reports = worker._examine(assignment, link, Alone(), ["n"])  # type: ignore[arg-type]
            assert [f.what for f in reports[0].findings] == ["sums"]
            assert link._where == (0, "starting", 0)
        assert sums == []
        assert place == [(0, "in the first NCCL sum", 0)] * len(summed)
        assert [call[0] for call in assignment.coordinator.calls] == ["unfit"] * unfit
        link.close()


def seats_of(*gpus: str) -> list[Seat]:
    """The seats of ranks on one node, each with one of these GPUs."""
    return seats([Placement("a", "10.0.0.1", number, (gpu,)) for number, gpu in enumerate(gpus)], 1)


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
        take_device(seat)
    assert cuda == [0, 1]


@pytest.mark.parametrize("gpus", [("0",), ("0", "1", "2"), ("GPU-1",)])
def test_a_device_that_cuda_does_not_show_is_missed_before_another_is_taken(
    gpus: tuple[str, ...], cuda: list[int]
) -> None:
    """It may have fallen out, so the failure policy judges it, as it does any failure of a node."""
    with pytest.raises(DeviceMissing) as raised:
        take_device(seats_of(*gpus)[0])
    assert cuda == []
    assert ",".join(gpus) in str(raised.value)
    _, calls = told(raised.value)
    assert [name for name, *_ in calls] == ["failed"]


def test_instances_of_one_machine_need_an_nccl_that_connects_them(
    cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    take_device(seats_of("MIG-1")[0])
    two = seats_of("MIG-1", "MIG-2")
    with pytest.raises(SeatError) as raised:
        take_device(two[1])
    _, calls = told(raised.value)
    assert [name for name, *_ in calls] == ["fail"]
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: NCCL_FOR_MIG)
    take_device(two[1])
    assert cuda == [0, 0]
