"""One `fit` of Ray Train, and what the driver does meanwhile: show progress, look for ranks that are stuck."""

import threading
import time
from typing import Any, Protocol

import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy

from launcher.elastic import Sizing, Start
from launcher.guard import Guard
from launcher.standing import Status
from launcher.worker import Assignment, train_rank

_POLL_S = 0.25
_ASK_S = 0.5  # between two questions whether ranks may start
_LOOK_S = 5.0  # between two looks whether more could
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
        """Until the ranks have ended, or are not to be started again. Returns what `fit` raised."""
        fitting = _Fit(trainer)
        fitting.start()
        while fitting.is_alive() and self.status.fatal is None and not self.status.idle:
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


class Scaling(ScalingPolicy):  # type: ignore[misc]  # Ray has no types
    """How many ranks Ray starts, and where: as the monitor says, each time that a group is to start.

    Ray's own elastic policy would count places on nodes that are to be left out, look at the cluster every 20 s, go on
    with fewer ranks at once, and enlarge a group by killing it between two checkpoints.
    """

    def __init__(self, scaling_config: ScalingConfig, monitor: Any) -> None:
        super().__init__(scaling_config)
        self._monitor = monitor
        self._failed: list[int] = []
        self._without: frozenset[str] = frozenset()
        self._looked = 0.0

    def make_decision_for_non_running_worker_group(self) -> NoopDecision | ResizeDecision:
        self._maybe_send_resource_request()
        start: Start | None = ray.get(self._monitor.next_group.remote(self._failed))
        if start is None:
            time.sleep(_ASK_S)  # Ray asks again at once
            return NoopDecision()
        self._failed, self._without = [], start.without
        return ResizeDecision(start.ranks, self.scaling_config._resources_per_worker_not_none)

    def make_decision_for_running_worker_group(self, **_: Any) -> NoopDecision:
        self._maybe_send_resource_request()
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self._monitor.look_around.remote()
        return NoopDecision()

    def on_controller_start_worker_group(self, **_: Any) -> dict[str, str] | None:
        """A selector of nodes, for every rank."""
        return {_NODE_LABEL: f"!in({','.join(sorted(self._without))})"} if self._without else None

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Keep which ranks Ray found dead or in error."""
        error = getattr(current_state, "training_failed_error", None)
        if isinstance(error, WorkerGroupError):
            self._failed = sorted(error.worker_failures)

    def _get_num_workers_for_resource_request(self) -> int:
        """What an autoscaler is asked for."""
        most: int = self.scaling_config.max_workers
        return most


class _Trainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """Ray's, with our policy of scaling in place of its own, and without the process that would hold Ray datasets,
    which every group of ranks waits for. There is no public way to either."""

    def __init__(self, monitor: Any, **settings: Any) -> None:
        super().__init__(train_rank, **settings)
        self._monitor = monitor

    def _initialize_and_run_controller(self, **parts: Any) -> Result:
        ours = {"scaling_policy": Scaling(self.scaling_config, self._monitor)}
        return super()._initialize_and_run_controller(**parts | ours)

    def _create_default_callbacks(self) -> list[Any]:
        return [one for one in super()._create_default_callbacks() if not isinstance(one, DatasetsCallback)]


def trainer(assignment: Assignment, sizing: Sizing, scratch: str, name: str) -> TorchTrainer:
    """The ranks, restarted by Ray until the monitor says no.

    A fresh Ray run name every time: Ray must never find state of an earlier one.
    """
    gpu = "GPU" in sizing.each
    return _Trainer(
        assignment.monitor,
        train_loop_config={"assignment": assignment},
        scaling_config=ScalingConfig(
            num_workers=sizing.most,
            use_gpu=gpu,
            resources_per_worker=dict(sizing.each),
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
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
