"""What cells do: fine-tune on a task, as far as the task is one that is learnt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import TaskError
from launcher.evaluate.cell import Measure, Measured
from launcher.finetune.outcome import Diverged
from launcher.finetune.pretrained import Pretrained
from launcher.finetune.run import finetune
from launcher.finetune.settings import Settings, candidates
from launcher.recipe_yaml import Document, override
from launcher.tasks.task import Task, task_digest


@dataclass(frozen=True)
class Finetuning:
    """`wanted` learnt with `chosen` settings; `data` is the task's digest where the grid was planned."""

    wanted: Task
    chosen: Settings
    data: str

    kind = "finetune"

    @property
    def task(self) -> str:
        return self.wanted.name

    @property
    def settings(self) -> dict[str, object]:
        return {**self.chosen.model_dump(mode="json"), "after": self.wanted.after}

    def measure(self, pretrained: Pretrained, seed: int) -> Measured:
        """Metrics on dev. Raises as `finetune`; TaskError: this machine has other data than the grid was planned with.

        A fine-tuning that diverges is a result, too: one without a figure.
        """
        check_data(self.wanted, self.data)
        try:
            outcome = finetune(pretrained, self.wanted, self.chosen, seed)
        except Diverged as error:
            return Measured(metrics=dict.fromkeys(self.wanted.metrics), details={"diverged": error.problem})
        record = outcome.record()
        metrics = finite(outcome.metrics)
        return Measured(metrics=metrics, details={name: record[name] for name in record if name != "metrics"})


def check_data(task: Task, digest: str) -> None:
    """Raises TaskError: what the files of `task` hold here is not what `digest` was made of."""
    if task_digest(task) != digest:
        raise TaskError(
            f"the files of the task {task.name} at {task.root} are others on this machine than where the command runs",
            remedy="give every machine the same files: an s3:// URI or a shared folder as --data",
        )


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """None in place of what is no number, such as a correlation with a constant."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def measures(tasks: Sequence[Task], assignments: Sequence[str]) -> list[Measure]:
    """For each task every combination of its fine-tuning settings, `assignments` (`KEY=VALUE`) in place of its own.

    Raises: as `task_digest`, since the data are read; OptionError: settings that cannot be.
    """
    found: list[Measure] = []
    for task in tasks:
        given = override(Document(dict(task.finetune), task.name, {}), assignments).data
        digest = task_digest(task)
        found += [Finetuning(task, settings, digest) for settings in candidates(given, {})]
    return found
