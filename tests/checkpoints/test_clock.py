"""A wall clock that is set by minutes makes no live attempt look dead, and no dead one alive.

The clock is set while processes live, by a library in front of the C library's.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import RunIsActive
from checkpoints.ownership import read_attempt_status
from data_service import processes
from data_service.store.local import LocalStore

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real_open)(const char *, int, ...);

static long step(void) { /* seconds, read anew each time */
    char text[32] = {0};
    if (!real_open) real_open = dlsym(RTLD_NEXT, "open");
    int file = real_open(getenv("CLOCK_STEP"), O_RDONLY);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    if (!code && clock == CLOCK_REALTIME) at->tv_sec += step();
    return code;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
static int stat_of_boot(void) { /* as the kernel shows it after such a step */
    char line[4096];
    FILE *all = fdopen(real_open("/proc/stat", O_RDONLY), "r"), *copy = tmpfile();
    while (fgets(line, sizeof line, all)) {
        long btime;
        if (sscanf(line, "btime %ld", &btime) == 1) fprintf(copy, "btime %ld\n", btime + step());
        else fputs(line, copy);
    }
    fclose(all), rewind(copy);
    return dup(fileno(copy));
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    if (!real_open) real_open = dlsym(RTLD_NEXT, "open");
    return strcmp(path, "/proc/stat") ? real_open(path, flags, mode) : stat_of_boot();
}
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    return open64(path, flags, mode);
}
"""


@dataclass(frozen=True)
class SteppedClock:
    """The wall clock of the processes that have `environment`; others keep theirs."""

    library: Path
    ahead: Path

    @classmethod
    def build(cls, folder: Path) -> "SteppedClock":
        """Needs gcc."""
        source, library, ahead = folder / "clock.c", folder / "clock.so", folder / "ahead"
        source.write_text(_SOURCE)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True)
        ahead.write_text("0")
        return cls(library, ahead)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CLOCK_STEP": str(self.ahead)}

    def step(self, seconds: int) -> None:
        """Set the clock to `seconds` ahead of the machine's, from now on."""
        self.ahead.write_text(str(seconds))


pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

STEPS = (-3600, -300, -6, 6, 300, 3600)
LIVES = "from checkpoints.attempt import claim; claim(STORE); print('claimed', flush=True); input()"
TRIES = """
import time, psutil
from checkpoints.attempt import claim
from checkpoints.errors import RunIsActive
from checkpoints.ownership import read_attempt_status
print(int(time.time()), int(psutil.boot_time()), read_attempt_status(STORE, time.time()).state)
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


@pytest.mark.long
@pytest.mark.parametrize("first", STEPS[::2])
@pytest.mark.parametrize("then", STEPS[1::2])
def test_a_start_under_a_clock_that_was_set(tmp_path: Path, clock: SteppedClock, first: int, then: int) -> None:
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
    store, here = LocalStore(tmp_path), Owner.for_this_process(time.time())
    other = here.model_copy(update={"processes": f"pod-7 {processes.boot_id()} pid:[7]"})
    attempt: Attempt = claim(store, owner=other)
    attempt.write_heartbeat(time.time())
    beat = tmp_path / "attempts/000001.heartbeat.json"
    os.utime(beat, (time.time() - step, time.time() - step))
    seen = read_attempt_status(store, time.time())
    assert seen is not None
    assert seen.state == "running"
    with pytest.raises(RunIsActive):
        claim(store)
