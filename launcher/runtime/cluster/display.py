"""The operator's display: one line that is rewritten on a terminal, and a new line every now and then anywhere else."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from launcher.output import human_duration
from launcher.progress import shown_elsewhere, work
from launcher.runtime.run.metrics import losses_text, running_mean, shown_on, term_losses

_PLAIN_INTERVAL_S = 10.0
_STARTING = "starting"  # the activity of a rank that does nothing that takes long
_SHOWN_FIELDS = {"seconds", *(name for metric in shown_on("progress") for name in metric.fields)}


class Watch:
    """A display of the progress of training. It is no log: the metrics segments are the log. Close it when training is
    over."""

    def __init__(
        self, console: Console, total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total_steps
        self._clock = clock
        self._means: dict[str, float] = {}
        self._losses: dict[str, float] = {}  # losses of the newest step that was not skipped, by term
        self._printed_at = float("-inf")
        self._steps = False
        self._bar: Progress | None = None
        self._alone = ExitStack()  # while steps are shown here, no other progress is shown
        self._beginning = self._alone.enter_context(work("beginning"))
        self._doing, self._noted = _STARTING, "beginning"
        self._task = TaskID(0)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show the record of a step or an evaluation. Its fields are described in infra/docs/records.md."""
        if record["kind"] == "step":
            self._step(record)
        else:
            found = losses_text(term_losses(record), record.get("perplexity"))
            self.note(f"step {record['step']}/{self._total}  held out: {found}")

    def doing(self, doing: str) -> None:
        """Name in the live line what the first rank does, before the first step. What it calls starting has the name
        of the last note."""
        if not self._steps and doing != self._doing:
            self._beginning.begin(self._noted if doing == _STARTING else doing)
        self._doing = doing

    def note(self, text: str) -> None:
        """Print a line above the live one. Before the first step, the line also names what is under way."""
        self._noted = text.partition("\n")[0]
        self._beginning.begin(self._noted)
        (self._bar.console if self._bar else self._console).print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop updating and leave the last live line on the screen. It is safe to call this twice."""
        self._alone.close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _step(self, record: Mapping[str, Any]) -> None:
        for name in _SHOWN_FIELDS & record.keys():
            self._mean(name, record[name])
        if not record["skipped"]:
            self._losses = term_losses(record)
            for name, loss in self._losses.items():
                self._mean(f"{name} loss", loss)
        done = record["step"] + 1
        if not self._steps:
            self._steps = True
            self._alone.close()
            self._alone.enter_context(shown_elsewhere())
        if self._console.is_terminal:
            self._draw(done)
        elif self._clock() - self._printed_at >= _PLAIN_INTERVAL_S or done == self._total:
            self._printed_at = self._clock()
            self.note(f"step {done}/{self._total}  {self._figures(done)}")

    def _draw(self, done: int) -> None:
        if self._bar is None:
            count = TextColumn("step {task.completed}/{task.total}")
            self._bar = Progress(
                count, BarColumn(24), TextColumn("{task.description}"), console=self._console
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=done, description=self._figures(done))

    def _figures(self, done: int) -> str:
        seconds = max(self._means["seconds"], 1e-9)
        losses = losses_text({name: self._means[f"{name} loss"] for name in self._losses})
        found = ((metric, metric.value_in(self._means)) for metric in shown_on("progress"))
        said = [metric.value_text(value) for metric, value in found if value is not None]
        ahead = f"ETA {human_duration((self._total - done) * seconds)}"
        return "  ".join(part for part in (losses, *said, ahead) if part)

    def _mean(self, name: str, value: float) -> None:
        self._means[name] = running_mean(self._means.get(name), value)
