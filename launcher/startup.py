"""Where the time goes between the start of a rank's function and the end of its first step."""

import time

import psutil


class Startup:
    """Told as each part ends. Every rank may keep one; the first rank's goes on record.

    Attributes:
        seconds: by part.
        age: seconds that the process was there before: its imports, or a life as one of Ray's idle workers.
        over: whether the first step is done.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.age = time.time() - psutil.Process().create_time()
        self.seconds: dict[str, float] = {}
        self.over = False

    def done(self, part: str) -> None:
        """What happened since the last part was `part`."""
        now = time.monotonic()
        self.seconds[part] = now - self._last
        self._last = now

    def first_step_done(self, data_wait: float) -> None:
        """The first step was the last part, and its first `data_wait` seconds a wait for data."""
        self.done("first step")
        self.seconds["first step"] -= data_wait
        self.seconds["data"] += data_wait
        self.over = True
