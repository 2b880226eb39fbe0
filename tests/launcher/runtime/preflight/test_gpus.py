"""NVML's answers, read. This machine has no GPU: a stand-in answers as the library does, errors included."""

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runtime.preflight.findings import judge_gpu
from launcher.runtime.preflight.measure import gpu_states
from tests.support.clusters.fake_gpus import shown

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


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
        "nvmlDeviceGetUUID": "GPU-1",
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
    """What is found of each GPU. What is not well has a remedy."""
    answer(monkeypatch, **answers)
    findings = [finding for state in gpu_states() for finding in judge_gpu(state)]
    assert all(bool(finding.remedy) == (finding.verdict != "ok") for finding in findings)
    return [(finding.verdict, finding.found) for finding in findings]


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


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    # remapped rows: correctable, uncorrectable, pending, failed
    "pending": ({"nvmlDeviceGetRemappedRows": (3, 2, 1, 0)}, "warning", "remapped"),
    "failed": ({"nvmlDeviceGetRemappedRows": (3, 2, 0, 1)}, "failure", "remapped"),
    "hot": (
        {"nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown},
        "warning",
        "heat",
    ),
    "errors": ({"nvmlDeviceGetTotalEccErrors": 5}, "warning", "5 uncorrected"),
    "without ECC": ({"nvmlDeviceGetEccMode": [0, 1]}, "warning", "ECC"),
    "not persistent": ({"nvmlDeviceGetPersistenceMode": 0}, "warning", "persistence"),
}


@pytest.mark.parametrize(("answers", "expected", "word"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_read_from_the_right_place(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], expected: str, word: str
) -> None:
    ((verdict, found),) = verdicts(monkeypatch, **answers)
    assert verdict == expected
    assert word in found
    assert "GPU-1" in found, "it is named by its id"


def test_all_that_ails_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"nvmlDeviceGetRemappedRows": (3, 2, 1, 0), "nvmlDeviceGetTotalEccErrors": 5}
    assert len(verdicts(monkeypatch, **both)) == 2


NOT_OURS = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
UNKNOWN = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
MACHINE = [f"GPU-{letter}" for letter in "cafebd"]
INSTANCES = {f"MIG-{gpu[4:]}{number}": gpu for gpu in MACHINE[:3] for number in range(2)}
"""Of GPUs that are cut: whose they are."""


def examined(
    variable: str | None,
    hidden: Sequence[str] = (),
    order: str | None = None,
) -> list[tuple[int | None, str]]:
    """Numbers and ids of the GPUs that are examined where `CUDA_VISIBLE_DEVICES` is `variable`. `hidden`: of other
    jobs. A handle of the stand-in is the id."""

    def handle(index: int) -> str:
        if MACHINE[index] in hidden:
            raise NOT_OURS
        return MACHINE[index]

    def by_id(uuid: str) -> str:
        if uuid not in INSTANCES:
            raise UNKNOWN
        return uuid

    answers = {
        "nvmlDeviceGetCount": lambda: len(MACHINE),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetHandleByUUID": by_id,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda instance: INSTANCES[instance],
    }
    told = {"CUDA_VISIBLE_DEVICES": variable, "CUDA_DEVICE_ORDER": order}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        answer(patch)
        for name, reply in answers.items():
            patch.setattr(pynvml, name, reply)
        for name, value in told.items():
            if value is not None:
                os.environ[name] = value
        return [(state.index, state.uuid) for state in gpu_states()]


@given(
    st.lists(st.sampled_from([*map(str, range(8)), "-1", "NoDevFiles", ""]), min_size=1, unique=True)
    | st.lists(st.sampled_from(["GPU-c", "GPU-e", "GPU-f", "GPU-"]), min_size=1, unique=True)
    | st.none(),
    st.sets(st.sampled_from(MACHINE), max_size=4),
)
def test_the_gpus_that_cuda_shows_are_examined_under_their_own_numbers(
    words: list[str] | None, hidden: set[str]
) -> None:
    """A job scheduler may hide GPUs of other jobs, which CUDA then does not count. `GPU-` means more than one."""
    ours = [uuid for uuid in MACHINE if uuid not in hidden]
    variable = None if words is None else ",".join(words)
    seen = examined(variable, hidden=list(hidden))
    found = [(index, uuid) for index, uuid in seen if index is not None]
    assert [uuid for _, uuid in found] == shown(variable, ours)[: len(found)]
    assert all(MACHINE[index] == uuid for index, uuid in found)
    missing = [uuid for index, uuid in seen if index is None]
    assert len(found) == len(shown(variable, ours)) or missing


def test_an_instance_is_examined_by_the_gpu_that_it_is_part_of() -> None:
    assert examined("MIG-a1") == [(1, "GPU-a")]
    assert examined("MIG-f0, MIG-c1,MIG-c0") == [(2, "GPU-f"), (0, "GPU-c")]


def test_a_gpu_that_is_named_and_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined("GPU-e,GPU-x") == [(3, "GPU-e"), (None, "GPU-x")]
    assert examined("MIG-x") == [(None, "MIG-x")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    assert [verdict for verdict, _ in verdicts(monkeypatch)] == ["failure"]


def test_if_the_user_has_gpus_numbered_by_speed_numbers_do_not_say_which() -> None:
    everything = list(enumerate(MACHINE))
    assert examined("1", order="FASTEST_FIRST") == everything
    assert examined("GPU-e", order="FASTEST_FIRST") == [(3, "GPU-e")]
    assert examined("1", order="PCI_BUS_ID") == [(1, "GPU-a")]
