"""Marks the tests of this folder as `gpu`, skips them where there is none, and prints what they measured."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from _pytest.terminal import TerminalReporter

from tests.gpu.machine import DEVICE, GPU, SMALL, Figure
from tests.gpu.networks import joined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    lacking = pytest.mark.skip(reason="torch finds no GPU; MASKFLEET_GPU_TESTS=small: small, on the CPU")
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("gpu")
            if item.get_closest_marker("timeout") is None:  # a thread ends what hangs in a kernel, and pytest with it
                item.add_marker(pytest.mark.timeout(600, method="thread"))
            if not (GPU or SMALL):
                item.add_marker(lacking)


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """The checks of shapes, which only tests have, can be neither compiled nor timed. No test leaves anything
    compiled."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def figure(record_property: "pytest.RecordProperty") -> Figure:  # type: ignore[name-defined]
    def record(what: str, found: float, unit: str) -> None:
        record_property(what, f"{found:.4g} {unit}")

    return record


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Torch's process group, which DeepSpeed needs even for a single rank, and of which it knows one a process."""
    with joined(DEVICE, tmp_path_factory.mktemp("group")):
        yield


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {what}: {found}"
        for report in reports
        if "gpu/test_" in report.nodeid
        for what, found in report.user_properties
    ]
    if lines:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(sorted(lines)) + "\n")
