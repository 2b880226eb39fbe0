"""Measures a machine before it trains: limits, memory, disks, GPUs, and the stores that a run reads and writes.

Every operation that a run needs is tried once on each store, and the store's clock is compared with this machine's. The
health of GPUs comes from NVIDIA's library NVML. NVML lists all GPUs of the machine by PCI bus, as nvidia-smi does; CUDA
shows a process only the GPUs in CUDA_VISIBLE_DEVICES. Past Xid errors are only in the kernel's log, which a container
rarely may read. This module asks for their traces: lost GPUs, remapped rows, error counts.
"""

import os
import resource
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from checkpoints.host_memory import available_memory
from data_service.corpus.manifest import MANIFEST_KEY
from data_service.errors import TokenizerError
from data_service.store.base import Store
from data_service.store.errors import StoreError, StoreUnavailable
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, GpuState
from launcher.runtime.preflight.network import connection_error, parse_ray_head
from launcher.runtime.recipe.corpora import corpora_by_name
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.summary import parameter_count, state_bytes
from launcher.runtime.run.record import RECORD_FILE, open_run

_T = TypeVar("_T")

_THROTTLE_REASONS = {  # bits of NVML's answer, by the reason's name for people
    "hardware, to protect itself": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "heat": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}

_ECC_QUERY = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
"""Arguments that make NVML count the uncorrected memory errors since the driver was loaded."""


def gpu_states() -> list[GpuState]:
    """Return the state of each GPU that CUDA would show this process, in CUDA's order; an empty list without NVIDIA's
    driver.

    If CUDA_DEVICE_ORDER makes CUDA number the GPUs by speed, the numbers in CUDA_VISIBLE_DEVICES do not identify GPUs.
    Then all GPUs of the machine are returned.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return _visible_gpus(_machine_gpu_states(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        pynvml.nvmlShutdown()


def _machine_gpu_states() -> list[GpuState]:
    """Return all GPUs of the machine that this process may use. GPUs that a job scheduler gave to other jobs are left
    out, and CUDA does not number them either."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(_gpu_state(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError_NoPermission:
            continue
        except pynvml.NVMLError as error:
            found.append(GpuState(index, "unknown GPU", lost=str(error)))
    return found


def _visible_gpus(machine: list[GpuState], variable: str | None) -> list[GpuState]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names. Like CUDA, stop at the first word that names no GPU."""
    if variable is None:
        return machine
    words = [word.strip() for word in variable.split(",")]
    if words[0].isdecimal() and os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") != "PCI_BUS_ID":
        return machine
    found: list[GpuState] = []
    for word in words:
        if (state := _named_gpu(machine, word)) is None:
            break
        if state not in found:
            found.append(state)
        if state.index is None:
            break
    return found


def _named_gpu(machine: list[GpuState], word: str) -> GpuState | None:
    """Return the GPU that a word of CUDA_VISIBLE_DEVICES names: its number, the beginning of its id, or a MIG id."""
    if word.isdecimal():
        return machine[int(word)] if int(word) < len(machine) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    try:
        uuid = _parent_gpu_id(word) if word.startswith("MIG-") else word
    except pynvml.NVMLError as error:
        return GpuState(None, "MIG instance", word, lost=str(error))
    alike = [state for state in machine if state.uuid.startswith(uuid)]
    if len(alike) == 1:
        return alike[0]
    return GpuState(None, "unknown GPU", word, lost=f"{len(alike)} GPUs of this machine have such an id")


def _parent_gpu_id(instance: str) -> str:
    """Return the id of the GPU that a MIG instance is part of."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(instance)
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))


def _gpu_state(index: int, handle: Any) -> GpuState:
    """Return the state of a GPU. Raises NVMLError if the GPU does not even report its name."""
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    try:
        reasons = _query_gpu(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        # Rows of GPU memory that were replaced: after correctable errors, after others, pending, and failed.
        remapped = _query_gpu(pynvml.nvmlDeviceGetRemappedRows, handle)
        return GpuState(
            index=index,
            name=name,
            uuid=uuid,
            uncorrected=_query_gpu(lambda gpu: int(pynvml.nvmlDeviceGetTotalEccErrors(gpu, *_ECC_QUERY)), handle),
            remap_failed=None if remapped is None else bool(remapped[3]),
            remap_pending=None if remapped is None else bool(remapped[2]),
            ecc=_query_gpu(lambda gpu: bool(pynvml.nvmlDeviceGetEccMode(gpu)[0]), handle),
            persistent=_query_gpu(lambda gpu: bool(pynvml.nvmlDeviceGetPersistenceMode(gpu)), handle),
            throttled=tuple(why for why, bit in _THROTTLE_REASONS.items() if reasons & bit),
        )
    except pynvml.NVMLError as error:
        return GpuState(index, name, uuid, lost=str(error))


def _query_gpu(query: Callable[[Any], _T], handle: Any) -> _T | None:
    """Return the GPU's answer; None if such a GPU does not have the property. Raises NVMLError if the GPU is lost."""
    try:
        return query(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission, pynvml.NVMLError_FunctionNotFound):
        return None


def try_store(store: Store, key: str) -> str:
    """Try every operation of the store, and leave no object behind. Return the store's error as text; "" if there is
    none. Raises StoreError."""
    try:
        if not store.put_if_absent(key, b"first") or store.put_if_absent(key, b"second"):
            return "a conditional put does not protect what exists"
        if store.get(key) != b"first" or store.get_range(key, 1, 3) != b"irs":
            return "an object that was put reads back with other content"
        if [entry.size for entry in store.list(key)] != [5]:
            return "a listing does not show what was just put"
    finally:
        store.delete(key)
    return "" if store.size(key) is None else "a deleted object is still there"


def store_finding(what: str, store: Store, key: str) -> Finding:
    """Return the finding on the operations of a store, named `what`. Raises the errors of `try_store`."""
    started = time.monotonic()
    wrong = try_store(store, key)
    if wrong:
        return Finding(what, "failure", wrong, "use a store with conditional puts (If-None-Match)")
    milliseconds = 1e3 * (time.monotonic() - started)
    return Finding(what, "ok", f"put, get, list, delete work ({milliseconds:.0f} ms in all)")


def clock_skew(store: Store) -> float | None:
    """Return the seconds that this machine's clock is ahead of the store's, to about a second; None if the store has no
    clock of its own."""
    before = time.time()
    theirs = store.clock()
    # A Date header has whole seconds, so the server's time is half a second later on average.
    return None if theirs is None else (before + time.time()) / 2 - (theirs + 0.5)


_PATIENCE_S = 2.0  # seconds of retries on a store that fails; training waits longer
_DEADLINE_S = 2.5  # time limit in seconds for all checks together
_MIB = 1 << 20
_MAX_OPEN_FILES = 65_536  # highest limit that `raise_open_files` sets

Check = Callable[[], list[Finding]]


@dataclass(frozen=True)
class PreflightSubject:
    """The recipe for which a machine is examined. `run`: URI of the recipe's run; None if there is no run yet."""

    recipe: Recipe
    run: str | None


def read_subject(target: str) -> PreflightSubject:
    """Return the subject for the name of a bundled recipe, the path of a recipe's file, or the URI of a run. Raises
    RecipeError, RunError, StoreError."""
    if target in bundled() or Path(target).is_file():
        return PreflightSubject(load(target), None)
    run = open_run(target)
    return PreflightSubject(run.recipe, run.uri)


def run_checks(subject: PreflightSubject | None) -> list[Finding]:
    """Make all checks at the same time, and return their findings after 2.5 s at most. A check that takes longer is
    itself a finding."""
    checks = dict(_checks(subject))
    pool = ThreadPoolExecutor(len(checks), thread_name_prefix="preflight")
    deadline = time.monotonic() + _DEADLINE_S
    try:
        running = {what: pool.submit(check) for what, check in checks.items()}
        return [finding for what, future in running.items() for finding in _check_result(what, future, deadline)]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _checks(subject: PreflightSubject | None) -> Iterator[tuple[str, Check]]:
    """Yield name and function of each check."""
    yield "memory", lambda: [findings.judge_memory(*available_memory())]
    yield "/dev/shm", lambda: [shared_memory_finding()]
    yield "open files", lambda: [open_files_finding()]
    yield "temporary disk", lambda: [temporary_disk_finding()]
    yield "GPUs", lambda: [finding for state in gpu_states() for finding in findings.judge_gpu(state)]
    if address := os.environ.get("RAY_ADDRESS"):
        yield "Ray cluster", lambda: [_ray_head_finding(address)]
    if subject is None:
        return
    for name, source in corpora_by_name(subject.recipe).items():
        yield f"corpus {name}", lambda name=name, uri=source.uri: [_corpus_finding(name, uri)]  # type: ignore[misc]
    if subject.run is not None:
        store, kept = open_store(subject.run, patience_s=_PATIENCE_S), subject.recipe.checkpoint.keep_last
        yield "run's store", lambda: [_run_store_finding(store)]
        yield "clock", lambda: [findings.judge_clock(clock_skew(store))]
        if isinstance(store, LocalStore):
            recipe = subject.recipe
            yield (
                "checkpoints' disk",
                lambda: [_checkpoint_disk_finding(store.root, _checkpoint_bytes(recipe), kept)],
            )


def _check_result(what: str, future: "Future[list[Finding]]", deadline: float) -> list[Finding]:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except Late:
        return [Finding(what, "warning", f"no answer in {_DEADLINE_S} s", "check the network and the store")]
    except StoreUnavailable as error:  # the store may come back, and training waits longer than this check
        return [Finding(what, "warning", error.problem, error.remedy)]
    except StoreError as error:
        return [Finding(what, "failure", error.problem, error.remedy)]


def raise_open_files() -> None:
    """Raise this process's limit on open files as far as allowed, up to `_MAX_OPEN_FILES`. Ray does the same when it
    starts, so a low limit that can be raised needs no warning."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # if the limit cannot be raised, the check reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_finding() -> Finding:
    """Return the finding on this process's limit on open files."""
    return findings.judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def shared_memory_finding() -> Finding:
    usage = shutil.disk_usage("/dev/shm")
    return findings.judge_shared_memory(usage.total, usage.free, len(gpu_states()))


def temporary_disk_finding() -> Finding:
    folder = os.environ.get("TMPDIR", "/tmp")
    return findings.judge_temporary_disk(shutil.disk_usage(folder).free, folder)


def _checkpoint_bytes(recipe: Recipe) -> int:
    """Return the bytes of a checkpoint with the tokenizer's vocabulary; with one of an assumed size if the tokenizer
    cannot be read."""
    try:
        vocabulary = None if recipe.model.vocab else load_tokenizer(recipe.tokenizer.uri).vocab_size
    except (StoreError, TokenizerError):
        vocabulary = None
    return state_bytes(recipe, parameter_count(recipe, vocabulary))


def _checkpoint_disk_finding(root: Path, size: int, kept: int) -> Finding:
    folder = next(path for path in (root, *root.parents) if path.exists())
    return findings.judge_checkpoint_disk(shutil.disk_usage(folder).free, str(folder), size, kept)


def _run_store_finding(store: Store) -> Finding:
    if store.size(RECORD_FILE) is None:
        remedy = "use a folder that all nodes share, mounted at the same path, or a URI of an object store"
        return Finding("run's store", "failure", f"{store.uri} on this node is not the run: no {RECORD_FILE}", remedy)
    return store_finding("run's store", store, f"preflight/{uuid.uuid4().hex}")


def _corpus_finding(name: str, uri: str) -> Finding:
    store = open_store(uri, patience_s=_PATIENCE_S)
    size = store.size(MANIFEST_KEY)
    if size is None:
        remedy = "mount the corpus's folder on this node, at the same path as on the others"
        return Finding(f"corpus {name}", "failure", f"{uri} on this node has no {MANIFEST_KEY}", remedy)
    store.get_range(MANIFEST_KEY, 0, min(size, _MIB))
    return Finding(f"corpus {name}", "ok", f"{uri} can be read")


def _ray_head_finding(address: str) -> Finding:
    """Try a TCP connection to the head of the Ray cluster at `address`."""
    if parse_ray_head(address) is None:
        return Finding("Ray cluster", "ok", f"{address}: found by Ray itself")
    refused = connection_error(address, _PATIENCE_S)
    if refused is None:
        return Finding("Ray cluster", "ok", f"{address} answers")
    remedy = "check that the cluster's head is up and that this node can reach RAY_ADDRESS (firewalls, security groups)"
    return Finding("Ray cluster", "failure", f"{address}: {refused}", remedy)
