"""A wall clock that is set by minutes makes no live attempt look dead, and no dead one alive."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import RunIsActive
from checkpoints.ownership import presence
from data_service import processes
from data_service.store.local import LocalStore
from tests.support.faults.clock import SteppedClock

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

STEPS = (-3600, -300, -6, 6, 300, 3600)
LIVES = "from checkpoints.attempt import claim; claim(STORE); print('claimed', flush=True); input()"
TRIES = """
import time, psutil
from checkpoints.attempt import claim
from checkpoints.errors import RunIsActive
from checkpoints.ownership import presence
print(int(time.time()), int(psutil.boot_time()), presence(STORE, time.time()).state)
try:
    print(claim(STORE).number)
except RunIsActive:
    print("refused")
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> SteppedClock:
    return SteppedClock.build(tmp_path_factory.mktemp("clock"))


def python(program: str, store: LocalStore, clock: SteppedClock) -> "subprocess.Popen[str]":
    opened = f"from data_service.store.open import open_store; STORE = open_store({store.uri!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", opened + program],
        env=os.environ | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("first", STEPS[::2])
@pytest.mark.parametrize("then", STEPS[1::2])
def test_a_start_under_a_clock_that_was_set(
    tmp_path: Path, clock: SteppedClock, first: int, then: int
) -> None:
    store = LocalStore(tmp_path)
    clock.step(first)
    living = python(LIVES, store, clock)
    try:
        assert living.stdout is not None
        assert living.stdout.readline() == "claimed\n"
        clock.step(then)
        said = python(TRIES, store, clock).communicate()[0].split()
        assert abs(int(said[0]) - time.time() - then) < 60  # the library is in force, in both places
        assert abs(int(said[1]) - psutil.boot_time() - then) < 60
        assert said[2:] == ["running", "refused"]
    finally:
        living.kill()
        living.communicate()
    clock.step(first)
    assert python(TRIES, store, clock).communicate()[0].split()[2:] == ["dead", "2"]


@pytest.mark.parametrize("step", STEPS)
def test_in_another_container_the_seconds_since_boot_decide(tmp_path: Path, step: int) -> None:
    """What a step leaves behind is a heartbeat whose time of writing lies in the past or in the future."""
    store, here = LocalStore(tmp_path), Owner.here(time.time())
    other = here.model_copy(update={"processes": f"pod-7 {processes.boot()} pid:[7] since boot"})
    attempt: Attempt = claim(store, owner=other)
    attempt.beat(time.time())
    beat = tmp_path / "attempts/000001.heartbeat.json"
    os.utime(beat, (time.time() - step, time.time() - step))
    seen = presence(store, time.time())
    assert seen is not None
    assert seen.state == "running"
    with pytest.raises(RunIsActive):
        claim(store)
