"""Clients of trackers: the interface that publishing needs, and its implementations for W&B and MLflow.

W&B's own step counter only increases, so figures are drawn over a metric of ours, `step`. If a run goes back, the
repeated steps are logged again. Of several rows of a step the last one counts; `times_gone_back` tells them apart. An
offline run has a folder for each start of `maskfleet train`, all with one id; `wandb sync` merges them into one run.

MLflow keeps every value that was logged for a metric at a step, with its time. If a run goes back, the repeated steps
are logged again with a later time; of several values of a step the newest one counts.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from launcher.runtime.recipe.operation import Mlflow, Wandb, holds_login

_TAGS = 50  # largest number of tags, one for each kind of event
_ID, _LOGGED = "maskfleet.id", "maskfleet.logged"
_METRICS, _PARAMS = 900, 100  # of one request; MLflow allows 1000 with tags, of these 100 parameters
_LONGEST = 500  # characters of a parameter: the limit of older servers
_STATES = {"finished": "FINISHED", "failed": "FAILED"}


class Hopeless(Exception):
    """Publishing to the tracker fails now and would fail later. The message tells the operator what to do."""


class PublishRequest(BaseModel):
    """A request to publish a run to a tracker.

    Attributes:
        uri, name: URI and name of the run.
        recipe: leaf values of its recipe by dotted path, shown as the run's configuration.
        tracker: settings of the tracker.
        folder: folder for files of the client; None: the client's default.
        poll_s: seconds between two reads of the run's store.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    name: str
    recipe: dict[str, object]
    tracker: Wandb | Mlflow
    folder: str | None
    poll_s: float


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step, by name."""

    step: int
    figures: dict[str, float]


@dataclass(frozen=True)
class EventSummary:
    """A summary of a run's events.

    Attributes:
        counts: number of events by kind.
        text: the newest events, a line each.
        end: "finished", "failed", or None if the run may continue.
    """

    counts: Mapping[str, int]
    text: str
    end: str | None


class Tracker(Protocol):
    """A run in a tracker, new or continued.

    Attributes:
        sure: whether rows are durable when `log` returns, even if this process dies then.
    """

    sure: bool

    def log(self, rows: Sequence[StepFigures]) -> None: ...
    def tell(self, story: EventSummary) -> None: ...
    def finish(self, story: EventSummary) -> None:
        """Make everything that was logged durable, and set the state of the run."""
        ...


class WandbRun:
    """A run of W&B. Rows are durable only after `finish`: until then the client may hold them in memory."""

    sure = False

    def __init__(self, order: PublishRequest, settings: Wandb, identifier: str) -> None:
        """Open the run. Raises Hopeless if the client is not installed or has no login."""
        try:
            import wandb
        except ImportError as error:
            raise Hopeless(f"{error}: install maskfleet[wandb]") from error
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True
        )
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                dir=order.folder,
                id=identifier,
                resume="allow",
                name=order.name,
                config=order.recipe | {"run": order.uri},
                settings=quiet,
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise Hopeless(f"{error}: set WANDB_API_KEY, or mode: offline") from error
        self._teardown = wandb.teardown
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[StepFigures]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.figures})

    def tell(self, story: EventSummary) -> None:
        self._run.tags = sorted(story.counts)[:_TAGS]
        self._run.notes = story.text

    def finish(self, story: EventSummary) -> None:
        self._run.finish(exit_code=int(story.end == "failed"))
        self._teardown()  # its own process ends


class MlflowRun:
    """A run of MLflow. A tag with our identifier marks it on every server."""

    sure = True

    def __init__(self, order: PublishRequest, settings: Mlflow, identifier: str) -> None:
        """Open the run. Raises Hopeless if the client is not installed or no server is named."""
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise Hopeless(f"{error}: install maskfleet[mlflow]") from error
        self._client = MlflowClient(_server(settings))
        self._run, self._time = self._open(order, settings.experiment, identifier)
        self._client.update_run(self._run, status="RUNNING")

    def log(self, rows: Sequence[StepFigures]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = []
        for row in rows:
            self._time = max(int(time.time() * 1000), self._time + 1)  # another machine's clock may be ahead
            metrics += [Metric(name, value, self._time, row.step) for name, value in row.figures.items()]
        logged = RunTag(_LOGGED, str(self._time))
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics[start : start + _METRICS], tags=[logged])

    def tell(self, story: EventSummary) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"events.{kind}", str(count)) for kind, count in story.counts.items()]
        self._client.log_batch(self._run, tags=[*tags, RunTag("mlflow.note.content", story.text)])

    def finish(self, story: EventSummary) -> None:
        """Set the state of a run that has finished or failed. An interrupted run keeps the state "running", because it
        may continue."""
        if story.end is not None:
            self._client.set_terminated(self._run, _STATES[story.end])

    def _open(self, order: PublishRequest, experiment: str, identifier: str) -> tuple[str, int]:
        """Return the id of the run in MLflow, and the time of the last logged values in ms."""
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([place], f"tags.`{_ID}` = '{identifier}'", max_results=1)
        if runs:
            return runs[0].info.run_id, int(runs[0].data.tags.get(_LOGGED, 0))
        made = self._client.create_run(place, run_name=order.name, tags={_ID: identifier})
        self._describe(made.info.run_id, order)
        return made.info.run_id, 0

    def _describe(self, run: str, order: PublishRequest) -> None:
        """Log the recipe as parameters. MLflow never changes parameters, so they stay as the run was first
        published."""
        from mlflow.entities import Param

        values = {"run": order.uri} | order.recipe
        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in values.items()]
        for start in range(0, len(parameters), _PARAMS):
            self._client.log_batch(run, params=parameters[start : start + _PARAMS])


def _server(settings: Mlflow) -> str:
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise Hopeless("no server is named: set logging.mlflow.uri or MLFLOW_TRACKING_URI")
    if holds_login(uri):
        raise Hopeless(
            "MLFLOW_TRACKING_URI holds a login: set MLFLOW_TRACKING_USERNAME and _PASSWORD instead"
        )
    return uri
