"""NVML's answers, read. This machine has no GPU: a stand-in answers as the library does, errors included."""

from typing import Any

import pynvml
import pytest

from launcher.preflight.findings import gpu
from launcher.preflight.gpus import gpu_states

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


def answer(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Functions of NVML by name: what each returns, or raises if it is an error."""

    def reply(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    usual = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetPersistenceMode": 1,
    }
    for name, value in {**usual, **answers}.items():
        assert hasattr(pynvml, name)
        monkeypatch.setattr(pynvml, name, lambda *_, value=value: reply(value))


def verdicts(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[tuple[str, str]]:
    answer(monkeypatch, **answers)
    return [(finding.verdict, finding.found) for state in gpu_states() for finding in gpu(state)]


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, nvmlInit=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)) == []


def test_healthy_gpus_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(monkeypatch, nvmlDeviceGetCount=2) == [("ok", "NVIDIA H100")] * 2


def test_a_gpu_that_knows_of_none_of_it_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = (
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetPersistenceMode",
    )
    assert verdicts(monkeypatch, **dict.fromkeys(silent, NOT_SUPPORTED)) == [("ok", "NVIDIA H100")]


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEccErrors"])
def test_a_lost_gpu_is_a_failure(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((verdict, found),) = verdicts(monkeypatch, **{question: LOST})
    assert verdict == "failure"
    assert "lost" in found.lower()


def test_what_is_wrong_is_read_from_the_right_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"nvmlDeviceGetRemappedRows": (3, 2, 1, 0)}  # correctable, uncorrectable, pending, failed
    assert [verdict for verdict, _ in verdicts(monkeypatch, **rows)] == ["warning"]
    rows = {"nvmlDeviceGetRemappedRows": (3, 2, 0, 1)}
    assert [verdict for verdict, _ in verdicts(monkeypatch, **rows)] == ["failure"]
    hot = {"nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown}
    assert "heat" in verdicts(monkeypatch, **hot)[0][1]
    assert "5 uncorrected" in verdicts(monkeypatch, nvmlDeviceGetTotalEccErrors=5)[0][1]
    assert "ECC is off" in verdicts(monkeypatch, nvmlDeviceGetEccMode=[0, 1])[0][1]
    assert "persistence" in verdicts(monkeypatch, nvmlDeviceGetPersistenceMode=0)[0][1]
