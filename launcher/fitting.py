"""One `fit` of Ray Train, and what the driver does meanwhile: show progress, look for ranks that are stuck."""

import threading
from typing import Any, Protocol

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from launcher.guard import Guard
from launcher.monitor import Status
from launcher.resources import Resources
from launcher.worker import Assignment, train_rank

_POLL_S = 0.25
_NODE_LABEL = "ray.io/node-id"


class Display(Protocol):
    """What shows a run to its operator."""

    def update(self, status: Status) -> None: ...
    def note(self, text: str) -> None: ...


class Follow:
    """Stays with the ranks of a start, through as many fits as it takes.

    Attributes:
        status: how they stand, as of the last look.
    """

    def __init__(self, monitor: Any, guard: Guard, display: Display) -> None:
        self.status = Status()
        self._monitor, self._guard, self._display = monitor, guard, display

    def fit(self, trainer: TorchTrainer) -> BaseException | None:
        """Until the ranks have ended, or must not be started again. Returns what `fit` raised."""
        fitting = _Fit(trainer)
        fitting.start()
        while fitting.is_alive() and self.status.fatal is None:
            self._look()
            self._guard.check(self.status)
            fitting.join(_POLL_S)
        self._look()
        return fitting.error

    def _look(self) -> None:
        self.status = ray.get(self._monitor.status.remote())
        for text in self.status.notes:
            self._display.note(text)
        self._display.update(self.status)


def trainer(
    assignment: Assignment, resources: Resources, scratch: str, name: str, without: frozenset[str]
) -> TorchTrainer:
    """The ranks, on any nodes but those in `without`, restarted by Ray until the monitor says no.

    A fresh Ray run name every time: Ray must never find state of an earlier one.
    """
    return TorchTrainer(
        train_rank,
        train_loop_config={"assignment": assignment},
        scaling_config=ScalingConfig(
            num_workers=resources.trainers,
            use_gpu=resources.gpus_per_trainer > 0,
            resources_per_worker=resources.per_trainer(),
            label_selector={_NODE_LABEL: f"!in({','.join(sorted(without))})"} if without else None,
        ),
        torch_config=TorchConfig(backend="nccl" if resources.gpus_per_trainer else "gloo"),
        run_config=RunConfig(
            name=name,
            storage_path=scratch,
            failure_config=FailureConfig(max_failures=-1),  # the monitor decides when to give up
        ),
    )


class _Fit(threading.Thread):
    """`trainer.fit()` beside the main thread, which must stay free for signals and the display."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="ray-train", daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # handed to the main thread, which raises it
            self.error = error
