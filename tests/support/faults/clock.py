"""A wall clock that is set while processes live: a library in front of the C library's, for one process at a time."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

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
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True
        )
        ahead.write_text("0")
        return cls(library, ahead)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CLOCK_STEP": str(self.ahead)}

    def step(self, seconds: int) -> None:
        """Set the clock to `seconds` ahead of the machine's, from now on."""
        self.ahead.write_text(str(seconds))
