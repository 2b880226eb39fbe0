"""A clock for the parts of a start, from the command (or a rank process's start) to the end of the first step."""

import os
import time
from collections.abc import Mapping

from data_service.processes import process_age_s

_MIN_SHOWN_S = 0.05  # seconds; shorter parts are not shown


class StartupClock:
    """A clock for the parts of a start; `end_part` is called when a part ends. The driver and every rank have one;
    that of rank 0 is recorded.

    Args:
        before: seconds of the driver's parts, which came before this rank's, by the name of the part.
        since: time at which the first part began, by `time.monotonic`; None for now.
        processes: number of the group's processes by origin: "stayed" (from the last group), "spare", "new".

    Attributes:
        seconds: seconds of each part so far, by the name of the part.
        age: seconds for which the process existed before `since`: its imports, or its time as an idle worker of Ray.
        over: whether the first step is done.
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        since: float | None = None,
        processes: Mapping[str, int] | None = None,
    ) -> None:
        now = time.monotonic()
        self.processes = dict(processes or {})
        self.before = dict(before or {})
        self._last = now if since is None else since
        self.age = process_age_s(os.getpid()) - (now - self._last)
        self.seconds: dict[str, float] = {}
        self.over = False

    @classmethod
    def since_process_start(cls, pid: int) -> "StartupClock":
        """Return the driver's clock, whose first part begins at the start of the command's process `pid`."""
        return cls(since=time.monotonic() - process_age_s(pid))

    def end_part(self, part: str) -> None:
        """Note that `part` ends now. It began when the last part ended."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def end_first_step(self, data_wait: float) -> None:
        """Note that the first step, the last part of a start, ends now. Its first `data_wait` seconds, a wait for data,
        are counted in the part "data" instead."""
        self.end_part("first step")
        self.seconds["first step"] -= data_wait
        self.seconds["data"] += data_wait
        self.over = True

    def to_text(self) -> str:
        """Return the parts as text for the operator: `8.3 s (Ray 2.1, model 1.4, ...)`."""
        parts = self.before | self.seconds
        shown = ", ".join(f"{part} {time:.1f}" for part, time in parts.items() if time >= _MIN_SHOWN_S)
        return f"{sum(parts.values()):.1f} s ({shown})"
