"""Progress of a command on standard error: what it does, how far it is, and how long it still takes.

    with work("reading train", total=len(rows), unit="rows") as now:
        now.advance()

Code only declares its work. Nothing is shown before a command line asks for it (`show_progress`); then a thread shows
the innermost work that has begun and not ended: on a terminal in a line that is rewritten, anywhere else in a new line
once the work has lasted 3 s, and every 10 s from then on, less often after ten minutes. So even a library call that
reports nothing is shown with a name and a duration.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from data_service.printable import escape_controls
from launcher.output import StreamProxy, human_bytes, human_count, human_duration

BYTES_UNIT = "B"
"""A unit that is shown as KiB, MiB, ..."""
_FIRST_LINE_S, _LINE_INTERVAL_S, _MAX_LINE_INTERVAL_S = 3.0, 10.0, 60.0  # seconds before and between lines of a log
_AGE_DIVISOR = 60  # lines are 1/60 of the command's age apart, within the bounds above
_REDRAW_INTERVAL_S, _FIRST_DRAW_S = 0.25, 1.0  # seconds between redraws on a terminal, and before the first
_DEFAULT_COLUMNS = 80  # width of a terminal whose width is unknown
_MAX_EXACT_COUNT = 100_000  # counts above this are abbreviated


class Work:
    """A piece of work of a command, whose progress is shown.

    Attributes:
        name: name for the user, such as `reading train`.
        total: total number of units; None if unknown.
        unit: name of the counted units, or `BYTES_UNIT`; empty if nothing is counted.
    """

    def __init__(self, name: str, total: float | None, unit: str, began: float) -> None:
        self.name, self.total, self.unit = name, total, unit
        self._began = began
        self._done = self._already = 0.0
        self._lock = threading.Lock()
        self.told = False  # whether a line of a log has shown it

    def advance(self, units: float = 1, total: float | None = None) -> None:
        """Add `units` to the number of finished units. `total`: the total if it has become known."""
        with self._lock:
            self.total = self.total if total is None else total
            self._done += units

    def set_done(self, done: float, total: float | None = None) -> None:
        """Set the number of finished units. `total`: the total if it has become known."""
        with self._lock:
            self.total = self.total if total is None else total
            self._done = done

    def begin_part(self, name: str, total: float | None = None) -> None:
        """Begin another part of the work, whose units are counted from 0."""
        with self._lock:
            self.name, self.total, self.told = name, total, False
            self._done = self._already = 0.0
            self._began = time.monotonic()

    def set_already_done(self, done: float) -> None:
        """Set the number of units that an earlier command finished; they do not count towards the speed."""
        with self._lock:
            self._done = self._already = done

    def age_s(self, now: float) -> float:
        return now - self._began

    def describe(self, now: float) -> str:
        """Return the work's name, the number of finished units, and the time left at the present speed."""
        parts = [part for part in (self._amount_text(), self._time_text(now)) if part]
        return escape_controls(f"{self.name}: {', '.join(parts)}")

    def _amount_text(self) -> str:
        if not self.unit or (not self._done and self.total is None):
            return ""
        spell = human_bytes if self.unit == BYTES_UNIT else _count_text
        of = f" of {spell(self.total)}" if self.total is not None else ""
        return f"{spell(self._done)}{of}{'' if self.unit == BYTES_UNIT else f' {self.unit}'}"

    def _time_text(self, now: float) -> str:
        made, spent = self._done - self._already, now - self._began
        if self.total is not None and made > 0:
            return f"about {human_duration(spent * (max(0.0, self.total - self._done) / made))} left"
        return f"{human_duration(spent)} so far"


def _count_text(value: float) -> str:
    return f"{value:,.0f}" if value < _MAX_EXACT_COUNT else human_count(value)


class _ProgressDisplay:
    """Writes the progress of the current work with `write`. `columns`: returns the terminal's width; None for a log."""

    def __init__(self, write: Callable[[bytes], object], columns: Callable[[], int] | None, now: float) -> None:
        self._write, self._columns = write, columns
        self._began = self._said = now  # `_said`: when a line of the log, or other text, was last written
        self._drawn = False
        self._at_line_start = True  # assumption: earlier output ended with a newline
        self._lock = threading.RLock()

    def tick(self, current: Work | None, now: float) -> None:
        """Show `current` if its next line or redraw is due; clear the line if it is None."""
        with self._lock:
            if current is None:
                self.clear()
            elif self._columns is not None:
                if self._at_line_start and (self._drawn or now - self._said >= _FIRST_DRAW_S):
                    self._draw_line(current.describe(now)[: self._columns() - 1])
            elif self._is_due(current, now):
                current.told, self._said = True, now
                self._write_bytes(f"{current.describe(now)}\n".encode())

    def _is_due(self, current: Work, now: float) -> bool:
        silent = now - self._said
        if not current.told and current.age_s(now) >= _FIRST_LINE_S and silent >= _FIRST_LINE_S:
            return True
        return silent >= min(_MAX_LINE_INTERVAL_S, max(_LINE_INTERVAL_S, (now - self._began) / _AGE_DIVISOR))

    def clear_before_write(self, text: str, now: float) -> None:
        """Clear the progress line before `text` goes to standard output or error."""
        with self._lock:
            self.clear()
            if text:
                self._at_line_start, self._said = text.endswith("\n"), now

    def clear(self) -> None:
        if self._drawn:
            self._write_bytes(b"\r\x1b[K")
            self._drawn = False

    def _draw_line(self, line: str) -> None:
        self._write_bytes(f"\r{line}\x1b[K".encode())
        self._drawn = True

    def _write_bytes(self, data: bytes) -> None:
        with suppress(OSError):  # the reader of the pipe has gone
            self._write(data)


_works: list[Work] = []  # nested work in progress, innermost last
_screen: _ProgressDisplay | None = None  # the display, while progress is shown
_silence_depth = 0  # number of nested `silence_progress` blocks


@contextmanager
def work(name: str, total: float | None = None, unit: str = "") -> Iterator[Work]:
    """Declare that the command does the work `name` inside the `with` block, so that its progress is shown."""
    begun = Work(name, total, unit, time.monotonic())
    _works.append(begun)
    try:
        yield begun
    finally:
        _works.remove(begun)


@contextmanager
def silence_progress() -> Iterator[None]:
    """Show no progress inside the `with` block, because another display does, such as that of training."""
    global _silence_depth
    _silence_depth += 1
    try:
        yield
    finally:
        _silence_depth -= 1


def clear_before_write(text: str) -> None:
    """Clear the progress line. Call this before other text is written to the screen."""
    if _screen is not None:
        _screen.clear_before_write(text, time.monotonic())


@contextmanager
def show_progress(name: str) -> Iterator[None]:
    """Show this process's progress inside the `with` block; `name` is shown while no other work has begun."""
    global _screen
    descriptor, ended = os.dup(2), threading.Event()
    columns = (lambda: _terminal_columns(descriptor)) if os.isatty(descriptor) else None
    screen = _screen = _ProgressDisplay(lambda data: os.write(descriptor, data), columns, time.monotonic())
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _ObservedStream(sys.stdout), _ObservedStream(sys.stderr)
    thread = threading.Thread(target=_show_until_ended, args=(screen, ended), name="progress", daemon=True)
    try:
        with work(name):
            thread.start()
            yield
    finally:
        ended.set()
        thread.join()
        screen.clear()
        _screen = None
        sys.stdout, sys.stderr = streams
        os.close(descriptor)


def _terminal_columns(descriptor: int) -> int:
    try:
        return os.get_terminal_size(descriptor).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


def _reset_in_fork() -> None:
    """Show no progress in a forked process, which has no display thread."""
    global _screen
    _screen = None


os.register_at_fork(after_in_child=_reset_in_fork)


def _show_until_ended(screen: _ProgressDisplay, ended: threading.Event) -> None:
    while not ended.wait(_REDRAW_INTERVAL_S):
        screen.tick(_works[-1] if _works and not _silence_depth else None, time.monotonic())


class _ObservedStream(StreamProxy):
    """Standard output or error that clears the progress line before each write."""

    def write(self, text: str) -> int:
        clear_before_write(text)
        return self._stream.write(text)
