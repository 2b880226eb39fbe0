"""What the GPUs that this process sees say of their health, through NVIDIA's own library (NVML).

NVML lists all GPUs of the machine by PCI bus, as nvidia-smi does; CUDA shows a process those that CUDA_VISIBLE_DEVICES
names. Past Xid errors are in the kernel's log only, which a container rarely may read; what they leave behind (lost
GPUs, remapped rows, error counts) is asked for here.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from launcher.runtime.preflight.findings import GpuState

_T = TypeVar("_T")

_THROTTLING = {
    "hardware, to protect itself": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "heat": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


def gpu_states() -> list[GpuState]:
    """One for each GPU that CUDA would show this process, in CUDA's order; none without NVIDIA's driver.

    Numbers in CUDA_VISIBLE_DEVICES do not say which GPUs they mean if the user had CUDA number them by speed. Then all
    GPUs of the machine are examined.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return _visible(_machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        pynvml.nvmlShutdown()


def _machine() -> list[GpuState]:
    """All GPUs that this process may use. CUDA does not count those that a job scheduler gave to other jobs."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(_state(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError_NoPermission:
            continue
        except pynvml.NVMLError as error:
            found.append(GpuState(index, "unknown GPU", lost=str(error)))
    return found


def _visible(machine: list[GpuState], variable: str | None) -> list[GpuState]:
    """CUDA ignores whatever follows the first word that names no GPU."""
    if variable is None:
        return machine
    words = [word.strip() for word in variable.split(",")]
    if words[0].isdecimal() and os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") != "PCI_BUS_ID":
        return machine
    found: list[GpuState] = []
    for word in words:
        if (state := _named(machine, word)) is None:
            break
        if state not in found:
            found.append(state)
        if state.index is None:
            break
    return found


def _named(machine: list[GpuState], word: str) -> GpuState | None:
    """The GPU that a word of CUDA_VISIBLE_DEVICES means: its number, the beginning of its id, or a MIG instance."""
    if word.isdecimal():
        return machine[int(word)] if int(word) < len(machine) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    try:
        uuid = _whole(word) if word.startswith("MIG-") else word
    except pynvml.NVMLError as error:
        return GpuState(None, "MIG instance", word, lost=str(error))
    alike = [state for state in machine if state.uuid.startswith(uuid)]
    if len(alike) == 1:
        return alike[0]
    return GpuState(None, "unknown GPU", word, lost=f"{len(alike)} GPUs of this machine answer to this id")


def _whole(instance: str) -> str:
    """The id of the GPU that a MIG instance is part of. Drivers before 470 named instances after it."""
    if instance.startswith("MIG-GPU-"):
        return instance.removeprefix("MIG-").partition("/")[0]
    handle = pynvml.nvmlDeviceGetHandleByUUID(instance)
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))


def _state(index: int, handle: Any) -> GpuState:
    """Raises NVMLError: the GPU does not answer."""
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    try:
        reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        remapped = _ask(
            pynvml.nvmlDeviceGetRemappedRows, handle
        )  # correctable, uncorrectable, pending, failed
        return GpuState(
            index=index,
            name=name,
            uuid=uuid,
            uncorrected=_ask(_uncorrected, handle),
            remap_failed=None if remapped is None else bool(remapped[3]),
            remap_pending=None if remapped is None else bool(remapped[2]),
            ecc=_ask(_ecc, handle),
            persistent=_ask(_persistent, handle),
            throttled=tuple(why for why, bit in _THROTTLING.items() if reasons & bit),
        )
    except pynvml.NVMLError as error:
        return GpuState(index, name, uuid, lost=str(error))


def _ask(question: Callable[[Any], _T], handle: Any) -> _T | None:
    """The answer; None if this kind of GPU does not have the property. A lost GPU raises."""
    try:
        return question(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission, pynvml.NVMLError_FunctionNotFound):
        return None


def _uncorrected(handle: Any) -> int:
    kind, since_loaded = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return int(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since_loaded))


def _ecc(handle: Any) -> bool:
    return bool(pynvml.nvmlDeviceGetEccMode(handle)[0])


def _persistent(handle: Any) -> bool:
    return bool(pynvml.nvmlDeviceGetPersistenceMode(handle))
