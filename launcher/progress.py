"""What a person watching sees: one live line on a terminal, a plain line now and then anywhere else."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_SMOOTHING = 0.95  # of the running means, per step
_PLAIN_SECONDS = 10.0


class Watch:
    """Shows training as it goes. Not a log: the metrics segments are."""

    def __init__(
        self, console: Console, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._means: dict[str, float] = {}
        self._printed_at = float("-inf")
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def step(self, record: Mapping[str, Any]) -> None:
        """`record` as in the metrics (launcher/README.md)."""
        for name in ("seconds", "tokens", "data_wait"):
            self._mean(name, record[name])
        if not record["skipped"]:
            self._mean("loss", record["loss"])
        done = record["step"] + 1
        if self._console.is_terminal:
            self._draw(done)
        elif self._clock() - self._printed_at >= _PLAIN_SECONDS or done == self._total:
            self._printed_at = self._clock()
            self._console.print(f"step {done}/{self._total}  {self._figures(done)}", highlight=False)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        perplexity = f"perplexity {record['perplexity']:.2f}"
        self.say(f"step {record['step']}/{self._total}  held out: loss {record['loss']:.3f}  {perplexity}")

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        (self._bar.console if self._bar else self._console).print(text, highlight=False)

    def close(self) -> None:
        """Leaves the last live line standing. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, step: int) -> None:
        if self._bar is None:
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(24),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=step, description=self._figures(step))

    def _figures(self, step: int) -> str:
        seconds = max(self._means["seconds"], 1e-9)
        loss = f"loss {self._means['loss']:.3f}  " if "loss" in self._means else ""
        rate = f"{human_count(self._means['tokens'] / seconds)} tokens/s"
        wait = f"data wait {self._means['data_wait'] / seconds:.0%}"
        return f"{loss}{rate}  {wait}  ETA {human_duration((self._total - step) * seconds)}"

    def _mean(self, name: str, value: float) -> None:
        self._means[name] = _SMOOTHING * self._means.get(name, value) + (1 - _SMOOTHING) * value


def human_count(value: float) -> str:
    """1234567 -> "1.2M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


def human_bytes(value: float) -> str:
    """1234567 -> "1.2 MiB"."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def human_duration(seconds: float) -> str:
    """90061 -> "1d 1h"; 61 -> "1m 01s"; 5.25 -> "5.2s"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {whole % 60:02d}s"
    return f"{seconds:.1f}s"
