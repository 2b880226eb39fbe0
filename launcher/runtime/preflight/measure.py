"""Measures a machine before it trains: limits, memory, disks, and the stores that a run reads and writes.

Every operation that a run needs is tried once on each store, and its clock is compared with this machine's.
"""

import os
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_service.corpus.manifest import MANIFEST
from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import StoreError, StoreUnavailable
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding
from launcher.runtime.preflight.gpus import gpu_states
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.summary import parameters, state_bytes
from launcher.runtime.run.record import RECORD, open_run


def exercise(store: Store, key: str) -> str:
    """Try every operation of the store. Returns what the store does wrong, empty if nothing; leaves no object behind.
    Raises StoreError."""
    try:
        if not store.put_if_absent(key, b"first") or store.put_if_absent(key, b"second"):
            return "a conditional put does not protect what exists"
        if store.get(key) != b"first" or store.get_range(key, 1, 3) != b"irs":
            return "what was put is not what is read"
        if [entry.size for entry in store.list(key)] != [5]:
            return "a listing does not show what was just put"
    finally:
        store.delete(key)
    return "" if store.size(key) is None else "a deleted object is still there"


def skew(store: Store) -> float | None:
    """Seconds this machine's clock is ahead of the store's, to about a second; None if it has no clock of its own."""
    before = time.time()
    theirs = store.clock()
    return (
        None if theirs is None else (before + time.time()) / 2 - (theirs + 0.5)
    )  # a Date says whole seconds


_PATIENCE_S = 2.0  # with a store that fails; training itself has more
_DEADLINE_S = 2.5  # for all checks together
_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20
_MOST_FILES = 65_536

Check = Callable[[], list[Finding]]


@dataclass(frozen=True)
class PreflightSubject:
    """The recipe for which a machine is examined. `run`: the URI of its run, None if there is none yet."""

    recipe: Recipe
    run: str | None


def subject(target: str) -> PreflightSubject:
    """For a bundled recipe, a recipe's file, or the run at a URI. Raises RecipeError, RunError, StoreError."""
    if target in bundled() or Path(target).is_file():
        return PreflightSubject(load(target), None)
    run = open_run(target)
    return PreflightSubject(run.recipe, run.uri)


def examine(subject: PreflightSubject | None) -> list[Finding]:
    """All checks at once, in 2.5 s at most: one that does not end by then is itself a finding."""
    checks = dict(_checks(subject))
    pool = ThreadPoolExecutor(len(checks), thread_name_prefix="preflight")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        running = {what: pool.submit(check) for what, check in checks.items()}
        return [finding for what, future in running.items() for finding in _result(what, future, deadline)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _checks(subject: PreflightSubject | None) -> Iterator[tuple[str, Check]]:
    """By what they check."""
    yield "memory", lambda: [findings.memory(*available_memory())]
    yield "/dev/shm", lambda: [shared_memory()]
    yield "open files", lambda: [open_files()]
    yield "temporary disk", lambda: [temporary_disk()]
    yield "GPUs", lambda: [finding for state in gpu_states() for finding in findings.gpu(state)]
    if address := os.environ.get("RAY_ADDRESS"):
        yield "Ray cluster", lambda: [_reach(address)]
    if subject is None:
        return
    for name, source in subject.recipe.corpus.sources.items():
        yield f"corpus {name}", lambda name=name, uri=source.uri: [_corpus(name, uri)]  # type: ignore[misc]
    if subject.run is not None:
        store, kept = open_store(subject.run, patience_s=_PATIENCE_S), subject.recipe.checkpoint.keep_last
        yield "run's store", lambda: [_run_store(store)]
        yield "clock", lambda: [findings.clock(skew(store))]
        if isinstance(store, LocalStore):
            recipe = subject.recipe
            yield "checkpoints' disk", lambda: [_checkpoint_disk(store.root, _checkpoint_bytes(recipe), kept)]


def _result(what: str, future: "Future[list[Finding]]", deadline: float) -> list[Finding]:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except Late:
        return [
            Finding(what, "warning", f"no answer in {_DEADLINE_S} s", "look at the network and the store")
        ]
    except StoreUnavailable as error:  # it may come back, and training waits for it longer than this
        return [Finding(what, "warning", error.problem, error.remedy)]
    except StoreError as error:
        return [Finding(what, "failure", error.problem, error.remedy)]


def available_memory() -> tuple[int, int]:
    """Bytes that processes here can still get, and all there are: of the machine, or of the container's limit."""
    machine = psutil.virtual_memory()
    limit, used, cache = (
        _cgroup("memory.max"),
        _cgroup("memory.current"),
        _cgroup("memory.stat", "inactive_file"),
    )
    if limit is None or used is None or limit > machine.total:
        return machine.available, machine.total
    return min(machine.available, max(0, limit - used + (cache or 0))), limit


def _cgroup(file: str, field: str | None = None) -> int | None:
    """A number from this container's control group (version 2); None if there is none, or no limit."""
    path = _CGROUP / file
    if not path.is_file():
        return None
    text = path.read_text()
    if field is not None:
        text = dict(line.split() for line in text.splitlines()).get(field, "")
    return int(text) if text.strip().isdecimal() else None


def raise_open_files() -> None:
    """Let this process open as many files as it may, up to `_MOST_FILES`. Ray does the same where it is started, so
    that a limit which anybody may raise is nothing to warn of."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # then it stays, and is judged as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> Finding:
    """What this process may open."""
    return findings.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def shared_memory() -> Finding:
    usage = shutil.disk_usage("/dev/shm")
    return findings.shared_memory(usage.total, usage.free, len(gpu_states()))


def temporary_disk() -> Finding:
    folder = os.environ.get("TMPDIR", "/tmp")
    return findings.temporary_disk(shutil.disk_usage(folder).free, folder)


def _checkpoint_bytes(recipe: Recipe) -> int:
    """With the vocabulary of the run's tokenizer; with the usual one where that cannot be read."""
    try:
        vocabulary = None if recipe.model.vocab else load_tokenizer(recipe.tokenizer.uri).vocab_size
    except (StoreError, TokenizerError):
        vocabulary = None
    return state_bytes(recipe, parameters(recipe, vocabulary))


def _checkpoint_disk(root: Path, size: int, kept: int) -> Finding:
    folder = next(path for path in (root, *root.parents) if path.exists())
    return findings.checkpoint_disk(shutil.disk_usage(folder).free, str(folder), size, kept)


def _run_store(store: Store) -> Finding:
    if store.size(RECORD) is None:
        remedy = "a folder must be one that all nodes share, mounted at the same place; or use s3://"
        return Finding("run's store", "failure", f"{store.uri} is not the run's here: no {RECORD}", remedy)
    started = time.monotonic()
    wrong = exercise(store, f"preflight/{uuid.uuid4().hex}")
    if wrong:
        return Finding("run's store", "failure", wrong, "use a store with conditional puts (If-None-Match)")
    milliseconds = 1e3 * (time.monotonic() - started)
    return Finding("run's store", "ok", f"put, get, list, delete work ({milliseconds:.0f} ms in all)")


def _corpus(name: str, uri: str) -> Finding:
    store = open_store(uri, patience_s=_PATIENCE_S)
    size = store.size(MANIFEST)
    if size is None:
        remedy = "is its folder mounted on this node, at the same place as on the others?"
        return Finding(f"corpus {name}", "failure", f"{uri} has no {MANIFEST} here", remedy)
    store.get_range(MANIFEST, 0, min(size, _MIB))
    return Finding(f"corpus {name}", "ok", f"{uri} can be read")


def _reach(address: str) -> Finding:
    """A TCP connection to where the ranks' cluster is."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return Finding("Ray cluster", "ok", f"{address}: found by Ray itself")
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE_S):
            return Finding("Ray cluster", "ok", f"{address} answers")
    except OSError as error:
        remedy = "is the head up? Do RAY_ADDRESS, firewalls and security groups let this node reach it?"
        return Finding("Ray cluster", "failure", f"{address}: {error}", remedy)
