"""What the GPUs of this machine say of their health, through NVIDIA's own library (NVML).

Past Xid errors are in the kernel's log only, which a container rarely may read; what they leave behind (lost GPUs,
remapped rows, error counts) is asked for here.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from launcher.preflight.findings import GpuState

_T = TypeVar("_T")

_THROTTLING = {
    "hardware, to protect itself": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "heat": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


def gpu_states() -> list[GpuState]:
    """One for each GPU; none without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_state(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _state(index: int) -> GpuState:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        remapped = _ask(
            pynvml.nvmlDeviceGetRemappedRows, handle
        )  # correctable, uncorrectable, pending, failed
        return GpuState(
            index=index,
            name=name,
            uncorrected=_ask(_uncorrected, handle),
            remap_failed=None if remapped is None else bool(remapped[3]),
            remap_pending=None if remapped is None else bool(remapped[2]),
            ecc=_ask(_ecc, handle),
            persistent=_ask(_persistent, handle),
            throttled=tuple(why for why, bit in _THROTTLING.items() if reasons & bit),
        )
    except pynvml.NVMLError as error:
        return GpuState(index, "unknown GPU", lost=str(error))


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
