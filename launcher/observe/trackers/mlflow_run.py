"""A run of MLflow.

MLflow keeps every value that a metric was given at a step, with its time. Where the run went back, the steps that it
repeats are logged anew, with a later time: of several values of a step, the newest is the run's.
"""

import os
import time
from collections.abc import Sequence

from launcher.observe.trackers.publish import Hopeless, PublishRequest, StepFigures, Story
from launcher.runtime.recipe.operation import Mlflow, holds_login

_ID, _LOGGED = "maskfleet.id", "maskfleet.logged"
_METRICS, _PARAMS = 900, 100  # of one request; MLflow's limits are 1000 of both and tags, and 100
_LONGEST = 500  # characters of a parameter: the limit of older servers
_STATES = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowRun:
    """See `launcher.observe.trackers.publish.Tracker`. Known by a tag with our identifier, whichever server it is
    on."""

    sure = True

    def __init__(self, order: PublishRequest, settings: Mlflow, identifier: str) -> None:
        """Raises Hopeless: there is no client, or no server is named."""
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
            self._time = max(int(time.time() * 1000), self._time + 1)  # whatever another machine's clock said
            metrics += [Metric(name, value, self._time, row.step) for name, value in row.figures.items()]
        logged = RunTag(_LOGGED, str(self._time))
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics[start : start + _METRICS], tags=[logged])

    def tell(self, story: Story) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"events.{kind}", str(count)) for kind, count in story.counts.items()]
        self._client.log_batch(self._run, tags=[*tags, RunTag("mlflow.note.content", story.text)])

    def finish(self, story: Story) -> None:
        """A run that was interrupted is still running: it will go on."""
        if story.end is not None:
            self._client.set_terminated(self._run, _STATES[story.end])

    def _open(self, order: PublishRequest, experiment: str, identifier: str) -> tuple[str, int]:
        """The run's id there, and the time of what was logged last (ms)."""
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([place], f"tags.`{_ID}` = '{identifier}'", max_results=1)
        if runs:
            return runs[0].info.run_id, int(runs[0].data.tags.get(_LOGGED, 0))
        made = self._client.create_run(place, run_name=order.name, tags={_ID: identifier})
        self._describe(made.info.run_id, order)
        return made.info.run_id, 0

    def _describe(self, run: str, order: PublishRequest) -> None:
        """Parameters never change in MLflow: these are the recipe when the run was first published."""
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
