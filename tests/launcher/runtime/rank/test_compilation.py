"""Compiled layers in whole runs: the losses of Python, the same bits after a kill, and a compiler that is not there."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.bad_kernels import Misbehaviour
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SETTINGS = ("model.dropout=0.1", "model.attention_dropout=0.1")
ROUNDING = 1e-5  # nats


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is kept, for all tests here."""
    home = folder / "home"
    monkeypatch.setenv("HOME", str(home))
    return home


def compilations(run: str) -> list[dict[str, Any]]:
    return small_runs.events(run, "compilation")


_SMALL = "layers: 2, hidden: 32, heads: 2, feed_forward: 64, max_length: 64"
FAMILIES = {
    "roberta": (),
    "albert": (f"model={{family: albert, {_SMALL}, embedding: 16}}",),
    "deberta_v2": (f"model={{family: deberta_v2, {_SMALL}, buckets: 8}}",),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "zero"), [*(("roberta", zero) for zero in range(4)), ("albert", 3), ("deberta_v2", 3)]
)
def test_a_compiled_run_has_the_losses_of_python(folder: Path, home: Path, family: str, zero: int) -> None:
    """ALBERT and DeBERTa call a layer more than once."""
    settings = (*SETTINGS, *FAMILIES[family], f"zero={zero}")
    runs = [
        finish(
            small_runs.new_run(folder, f"compile-{choice}-{family}-{zero}", *settings, f"compile={choice}"),
            2,
            timeout=600,
        )
        for choice in ("false", "true")
    ]
    python, compiled = (small_runs.losses(run) for run in runs)
    assert np.abs(np.subtract(python, compiled)).max() <= ROUNDING
    (event,) = compilations(runs[1])
    assert event["compiled"]
    assert python != compiled  # it was used
    assert event["error"] <= event["bound"]


@pytest.mark.long
def test_killed_and_resumed_it_ends_in_the_same_bits(folder: Path, home: Path) -> None:
    settings = (*SETTINGS, "compile=true")
    undisturbed = finish(small_runs.new_run(folder, "undisturbed", *settings), 2, timeout=600)
    killed = small_runs.new_run(folder, "killed", *settings)
    assert KILLED in run_group(killed, 2, kill={1: 7}, timeout=600).codes
    finish(killed, 2, timeout=600)
    assert small_runs.digests(killed) == small_runs.digests(undisturbed)
    assert small_runs.losses(killed) == small_runs.losses(undisturbed)
    assert [event["kept"] for event in compilations(killed)] == ["on this machine"] * 2


@pytest.mark.parametrize(
    "how",
    [
        Misbehaviour("compiler", "segfault"),
        *(
            pytest.param(Misbehaviour("compiler", way, argument), marks=pytest.mark.long)
            for way, argument in (
                ("die", signal.SIGKILL),
                ("exit", 0),
                ("raise", "SystemExit"),
                ("hang", "busy"),
            )
        ),
    ],
    ids=lambda how: how.way,
)
def test_whatever_a_compiler_does_the_run_goes_on_in_python_at_the_first_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: Misbehaviour
) -> None:
    monkeypatch.setenv("HOME", str(folder / f"home-{how.way}"))  # where nothing was compiled before
    limits = ("watchdog.other=60",) if how.way == "hang" else ()
    run = small_runs.new_run(folder, f"bad-compiler-{how.way}", *SETTINGS, *limits, "compile=true")
    finish(run, 2, compiler=how)
    (event,) = compilations(run)
    assert not event["compiled"]
    assert event["failure"]
    assert np.isfinite(small_runs.losses(run)).all()


@pytest.mark.long
def test_a_machine_without_a_compiler_goes_on_in_python(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = folder / "broken" / "g++"  # found when it is needed; torch reads CXX once, maybe long ago
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder / "bare"))
    run = finish(small_runs.new_run(folder, "bare", *SETTINGS, "compile=true"), 2, timeout=600)
    (event,) = compilations(run)
    assert not event["compiled"]
    assert event["why"] == "it could not be compiled"
    assert event["failure"]
    assert np.isfinite(small_runs.losses(run)).all()
