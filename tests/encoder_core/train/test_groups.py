"""How a process gets away from sums with others. NCCL itself needs a GPU: tests/gpu/test_ranks.py."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from encoder_core.errors import LibraryChanged
from encoder_core.layers.torch_internals import nccl_backends
from encoder_core.train import groups
from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import RankGroup
from encoder_core.train.groups import (
    GroupsAborted,
    abort_groups,
    abort_groups_on_error,
    ensure_not_aborted,
    groups_failed,
    leave_count,
)

WAITS_S = 20.0


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The only rank of its group."""
    join()
    yield
    leave_groups()


def join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


class Backend:
    """A communicator whose memory is freed only when no other computes, as NCCL's."""

    def __init__(self, all_end: threading.Barrier, error: int = 0) -> None:
        self._all_end, self._error, self.aborted = all_end, error, False

    def abort(self) -> None:
        self._all_end.wait(WAITS_S)
        self.aborted = True

    def get_error(self) -> int:
        return self._error


class Group:
    """A group of processes, without the method that we use."""


def test_figures_are_not_exchanged_after_an_abort_until_the_groups_are_left() -> None:
    control = RankGroup.join()
    assert control.gather_rows([3.0]).item() == 3
    abort_groups()
    abort_groups()
    with pytest.raises(GroupsAborted):
        control.gather_rows([3.0])
    leave_groups(broken=True)
    join()
    assert RankGroup.join().gather_rows([3.0]).item() == 3


def test_groups_that_were_left_meanwhile_are_not_aborted() -> None:
    before = leave_count()
    leave_groups()
    join()
    abort_groups(before)
    ensure_not_aborted()
    abort_groups(leave_count())
    with pytest.raises(GroupsAborted):
        ensure_not_aborted()


def test_only_an_error_aborts() -> None:
    with abort_groups_on_error():
        pass
    ensure_not_aborted()
    with pytest.raises(KeyboardInterrupt), abort_groups_on_error():
        raise KeyboardInterrupt
    with pytest.raises(GroupsAborted):
        ensure_not_aborted()


def test_all_communicators_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they wait for each other, which was seen on a GPU."""
    together = threading.Barrier(3)
    backends = [Backend(together) for _ in range(3)]
    monkeypatch.setattr(groups, "nccl_backends", lambda: backends)
    abort_groups()
    assert all(backend.aborted for backend in backends)


def test_an_error_of_one_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = [Backend(threading.Barrier(1)), Backend(threading.Barrier(1))]
    monkeypatch.setattr(groups, "nccl_backends", lambda: backends)
    assert not groups_failed()
    backends[1] = Backend(threading.Barrier(1), error=2)
    assert groups_failed()
    abort_groups()
    assert not groups_failed(), "it is known"


def test_gloo_has_nothing_to_abort_and_names_that_torch_drops_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert nccl_backends() == []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={Group(): None}))
        with pytest.raises(LibraryChanged):
            nccl_backends()
