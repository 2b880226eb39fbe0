"""Exchange of JSON values between ranks: from all to all, to rank 0, or from rank 0. Nothing is pickled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import JsonValue, TypeAdapter

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat, Superseded
from data_service.store.errors import CredentialsExpired, CredentialsMissing, OutOfSpace, StoreError, StoreUnavailable

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of one training job. Every exchange is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        """Return every rank's value, in rank order. Meant for small values, because each rank receives all of them."""
        ...

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        """Return every rank's value, in rank order, on rank 0, and an empty list on the others."""
        ...

    def broadcast(self, value: JsonValue) -> JsonValue:
        """Return rank 0's value on all ranks. The other ranks' values are ignored."""
        ...


@dataclass(frozen=True)
class SingleRank:
    """A job of one rank."""

    rank: int = 0
    world: int = 1

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        return [value]

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        return [value]

    def broadcast(self, value: JsonValue) -> JsonValue:
        return value


def gather_as(peers: Peers, adapter: TypeAdapter[T], value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank. `adapter` converts values to and from JSON."""
    answers = peers.all_gather(adapter.dump_python(value, mode="json"))
    return [adapter.validate_python(answer) for answer in answers]


def gather_or_raise(peers: Peers, work: Callable[[], JsonValue]) -> list[JsonValue]:
    """Call `work` on every rank; return all results, in rank order, on every rank.

    Raises:
        StoreError, CheckpointError: `work` raised it on some rank. All ranks raise the error of the first such rank.
    """
    return [_value_or_raise(rank, answer) for rank, answer in enumerate(peers.all_gather(_value_or_error(work)))]


def broadcast_or_raise(peers: Peers, work: Callable[[], T], adapter: TypeAdapter[T]) -> T:
    """Call `work` on rank 0; return its result on all ranks. `adapter` converts it to and from JSON. Raises as
    `gather_or_raise`."""
    mine = _value_or_error(lambda: adapter.dump_python(work(), mode="json")) if peers.rank == 0 else None
    return adapter.validate_python(_value_or_raise(0, peers.broadcast(mine)))


def _value_or_error(work: Callable[[], JsonValue]) -> JsonValue:
    try:
        return {"value": work()}
    except (StoreError, CheckpointError) as error:
        return {"kind": _error_kind(error), "problem": error.problem, "remedy": error.remedy}


def _value_or_raise(rank: int, answer: JsonValue) -> JsonValue:
    match answer:
        case {"value": value}:
            return value
        case {"kind": str(kind), "problem": str(problem), "remedy": str(remedy)}:
            prefix = "" if kind == Superseded.__name__ else f"rank {rank}: "  # no single rank is superseded
            raise _ERRORS_BY_KIND[kind](f"{prefix}{problem}", remedy=remedy)
        case _:
            raise TypeError(f"rank {rank} sent an answer of an unknown form: {answer!r}")


_SHARED_ERRORS = (  # classes of errors that one rank reports and all ranks raise, subclasses first
    *(StoreUnavailable, CredentialsExpired, CredentialsMissing, OutOfSpace, StoreError),
    *(DamagedCheckpoint, NewerFormat, Superseded, CheckpointError),
)  # fmt: skip
_ERRORS_BY_KIND = {kind.__name__: kind for kind in _SHARED_ERRORS}


def _error_kind(error: StoreError | CheckpointError) -> str:
    """Return the name of the error's class in `_SHARED_ERRORS`; callers decide by it whether to wait for the store."""
    return next(kind.__name__ for kind in _SHARED_ERRORS if isinstance(error, kind))
