"""Many small requests at once: an answer takes tens of milliseconds, and thousands of them one by one minutes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_REQUESTS = 32  # on their way at the same time: as many connections as a client keeps

T = TypeVar("T")
R = TypeVar("R")


def together(request: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `request` returns for each item, in their order; so many answers at most are kept for a slow reader.

    Raises:
        whatever `request` raises; requests that have begun are waited for.
    """
    waiting = iter(items)
    with ThreadPoolExecutor(_REQUESTS) as threads:
        begun: list[Future[R]] = [threads.submit(request, item) for item in islice(waiting, _REQUESTS)]
        try:
            while begun:
                yield begun.pop(0).result()
                begun += [threads.submit(request, item) for item in islice(waiting, 1)]
        finally:
            for future in begun:
                future.cancel()
