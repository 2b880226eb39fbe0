"""Where the time goes between a command, or a rank's process, and the end of the first step."""

import time
from collections.abc import Mapping

import psutil

_SHOWN_S = 0.05  # shorter parts are no news to people


class Startup:
    """Told as each part ends. The driver keeps one, and every rank, of which the first one's goes on record.

    Args:
        before: the driver's parts before this rank's, by part, in seconds.
        since: when the first part began, by `time.monotonic`; None for now.

    Attributes:
        seconds: by part.
        age: seconds that the process was there before: its imports, or a life as one of Ray's idle workers.
        over: whether the first step is done.
    """

    def __init__(self, before: Mapping[str, float] | None = None, since: float | None = None) -> None:
        now = time.monotonic()
        self.before = dict(before or {})
        self._last = now if since is None else since
        self.age = time.time() - psutil.Process().create_time() - (now - self._last)
        self.seconds: dict[str, float] = {}
        self.over = False

    @classmethod
    def of_command(cls, pid: int) -> "Startup":
        """The driver's: its first part began with the command's process."""
        return cls(since=time.monotonic() - (time.time() - psutil.Process(pid).create_time()))

    def done(self, part: str) -> None:
        """What happened since the last part was `part`."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def first_step_done(self, data_wait: float) -> None:
        """The first step was the last part, and its first `data_wait` seconds a wait for data."""
        self.done("first step")
        self.seconds["first step"] -= data_wait
        self.seconds["data"] += data_wait
        self.over = True

    def spell(self) -> str:
        """For people: `8.3 s (Ray 2.1, model 1.4, ...)`."""
        parts = self.before | self.seconds
        shown = ", ".join(f"{part} {time:.1f}" for part, time in parts.items() if time >= _SHOWN_S)
        return f"{sum(parts.values()):.1f} s ({shown})"
