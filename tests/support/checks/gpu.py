"""Whether this machine has a GPU, told without torch: which kernels the tests run depends on it before any import."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

_LIBRARY = "libcuda.so.1"


def gpu_count() -> int:
    """By the driver's library, which heeds CUDA_VISIBLE_DEVICES; 0 where there is none or it does not work."""
    number = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(_LIBRARY)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(number)) == 0:
            return number.value
    return 0


def interpreted(environment: Mapping[str, str], gpus: int) -> str:
    """TRITON_INTERPRET of the tests: what is told, else 1 where there is no GPU."""
    return environment.get("TRITON_INTERPRET", "0" if gpus else "1")


def decide() -> None:
    """For this process and those that it starts. Triton reads it when it is imported."""
    told = "TRITON_INTERPRET" in os.environ
    os.environ["TRITON_INTERPRET"] = interpreted(os.environ, 0 if told else gpu_count())
