"""Asking a run to stop, from any machine that can write to its store.

    attempts/stop.json    which start is to end, who asks, and when

A request is for the start that it names and the starts of the same command before it. A later command finds an older
number, and goes on.
"""

import logging

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.store.base import Store
from data_service.store.errors import KeyMissing

_log = logging.getLogger(__name__)

_KEY = "attempts/stop.json"


class StopRequest(BaseModel):
    """Attributes: attempt: the newest when it was asked for. by: who asks, for people. time: seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int
    by: str
    time: float


def request_stop(store: Store, request: StopRequest) -> None:
    """Replaces an earlier request."""
    store.put(_KEY, request.model_dump_json().encode())


def stop_requested(store: Store, first: int) -> StopRequest | None:
    """The request that a command has to obey whose first attempt is `first`. One that cannot be read is none: nobody
    knows whom it was for."""
    try:
        request = StopRequest.model_validate_json(store.get(_KEY))
    except KeyMissing:
        return None
    except ValidationError:
        _log.warning("%s/%s cannot be read: ask again for the run to stop", store.uri, _KEY)
        return None
    return request if request.attempt >= first else None
