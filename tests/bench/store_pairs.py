"""Objects of 256 MB on an S3 server by boto3 and by obstore, in pairs: python tests/bench/store_pairs.py [URI].

Both are Maskfleet's own stores: `S3Store`, and `CloudStore`, which has Google's and Azure's services, here with
obstore's client for S3. Each pair writes and reads the same bytes by the one and then by the other; which is first
alternates. CPU seconds are those of this process, user and system; the server's are not counted. Without a URI, moto
serves.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer
from program import BenchError, note, run
from s3_place import place

from data_service.store.base import Store, parallel_map
from data_service.store.open import open_store

_MB = 10**6
_RANGE = _MB  # bytes of a short read, as of a block
_RANGES = 32  # of an object; moto copies all of it for each


@dataclass(frozen=True)
class Taken:
    """What one operation took. Wall and CPU in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class StorePairs:
    """Operations by name, and of each the pairs (boto3, obstore)."""

    size: int
    pairs: dict[str, list[tuple[Taken, Taken]]]


def bench_stores(
    uri: str | None, *, megabytes: int = 256, pairs: int = 8, progress: Callable[[str], None] = print
) -> StorePairs:
    """Measure below `uri`, whose objects are deleted afterwards.

    Raises:
        BenchError: obstore is not installed, or a store read other bytes than it wrote.
    """
    data = os.urandom(megabytes * _MB)
    found: dict[str, list[tuple[Taken, Taken]]] = {}
    with place(uri) as served:
        stores = {"boto3": open_store(f"{served.uri}/boto3"), "obstore": _by_obstore(f"{served.uri}/obstore")}
        for store in stores.values():
            store.put("warm", b"x")
            store.get("warm")
        for number in range(pairs):
            order = list(stores) if number % 2 == 0 else list(reversed(stores))
            taken = {name: _operations(stores[name], data) for name in order}
            for what in taken["boto3"]:
                found.setdefault(what, []).append((taken["boto3"][what], taken["obstore"][what]))
            progress(f"pair {number + 1} of {pairs}")
        for store in stores.values():
            store.delete("warm")
    return StorePairs(len(data), found)


def _operations(store: Store, data: bytes) -> dict[str, Taken]:
    """Write the object, read it whole and in short ranges, and delete it."""
    taken = {"write": _taken(lambda: store.put_buffers("large", [memoryview(data)]))}
    whole: list[bytes] = []
    taken["read"] = _taken(lambda: whole.append(store.get("large")))
    starts = [number * (len(data) - _RANGE) // _RANGES for number in range(_RANGES)]
    parts: list[bytes] = []
    taken["short reads"] = _taken(
        lambda: parts.extend(parallel_map(lambda start: store.get_range("large", start, _RANGE), starts))
    )
    store.delete("large")
    if whole != [data] or parts != [data[start : start + _RANGE] for start in starts]:
        raise BenchError("a store read other bytes than it wrote", remedy="measure on another server")
    return taken


def _taken(operation: Callable[[], Any]) -> Taken:
    began, used = time.perf_counter(), time.process_time()
    operation()
    return Taken(time.perf_counter() - began, time.process_time() - used)


def _by_obstore(uri: str) -> Store:
    """A store as of the other clouds, on S3."""
    try:
        from obstore.store import S3Store

        from data_service.store.cloud import CloudStore
        from data_service.store.cloud_client import CloudClient, CloudConnection
    except ImportError as error:
        raise BenchError("obstore is not installed", remedy="pip install 'maskfleet[clouds]'") from error
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    options = {"allow_http": True, "timeout": timedelta(hours=1)}
    made = S3Store(bucket, client_options=options, retry_config={"max_retries": 0})

    class Connection(CloudConnection):
        def client(self) -> CloudClient:
            return CloudClient(made, made, uri)

    return CloudStore(bucket, prefix, 60.0, Connection("gs", bucket), "gs")


def render(result: StorePairs) -> str:
    """A table of medians; in brackets the quotients of the pairs' extremes."""
    lines = [
        f"{result.size / _MB:.0f} MB, {len(next(iter(result.pairs.values())))} pairs; medians; short reads are "
        f"{_RANGES} of {_RANGE / _MB:.0f} MB, together",
        f"{'':<14}{'boto3 MB/s':>12}{'obstore MB/s':>14}{'time, boto3/obstore':>26}{'CPU s':>14}"
        f"{'CPU, boto3/obstore':>26}",
    ]
    for what, pairs in result.pairs.items():
        walls = [(one.wall, other.wall) for one, other in pairs]
        cpus = [(one.cpu, other.cpu) for one, other in pairs]
        megabytes = (_RANGES * _RANGE if what == "short reads" else result.size) / _MB
        lines.append(
            f"{what:<14}{megabytes / _median(walls, 0):>12.0f}{megabytes / _median(walls, 1):>14.0f}"
            f"{_quotient(walls):>26}{f'{_median(cpus, 0):.2f}, {_median(cpus, 1):.2f}':>14}{_quotient(cpus):>26}"
        )
    return "\n".join(lines)


def _median(pairs: list[tuple[float, float]], side: int) -> float:
    return statistics.median(pair[side] for pair in pairs)


def _quotient(pairs: list[tuple[float, float]]) -> str:
    found = [one / other for one, other in pairs if other]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-"


def main(
    uri: Annotated[str | None, typer.Argument(help="An s3:// address to measure at. Default: moto.")] = None,
    megabytes: Annotated[int, typer.Option("--megabytes", min=1)] = 256,
    pairs: Annotated[int, typer.Option("--pairs", min=1)] = 8,
) -> None:
    """Write and read objects on S3 through boto3 and through obstore, in pairs."""
    typer.echo(render(bench_stores(uri, megabytes=megabytes, pairs=pairs, progress=note)))


if __name__ == "__main__":
    run(main)
