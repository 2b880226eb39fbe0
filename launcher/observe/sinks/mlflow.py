"""Publishes a run to MLflow, which keeps every value that was logged for a metric at a step, with its time. If a run
goes back, the repeated steps are logged again with a later time; of several values of a step the newest one counts."""

import os
import time
from collections.abc import Callable, Sequence

from launcher.observe.sinks.sink import EventSummary, PublishRequest, Sink, StepFigures, UnusableSink
from launcher.runtime.recipe.parts import Mlflow, holds_login

_ID_TAG, _LAST_TIME_TAG = "maskfleet.id", "maskfleet.logged"  # tags: our id of the run, time of its last values
# Largest numbers of values in one request: MLflow allows 1000 including tags, 100 of them parameters.
_MAX_REQUEST_METRICS, _MAX_REQUEST_PARAMS = (
    900,
    100,
)
_MAX_PARAM_CHARACTERS = 500  # longest parameter value that older servers accept
_MLFLOW_STATES = {"finished": "FINISHED", "failed": "FAILED"}  # MLflow's names of how a run ended


class MlflowRun(Sink):
    """A sink that logs to a run of MLflow, which it finds again by a tag with our identifier."""

    def __init__(self, request: PublishRequest, identify: Callable[[], str], *_: object) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UnusableSink(f"{error}: install maskfleet[mlflow]") from error
        settings = request.mlflow
        assert settings is not None
        self._client = MlflowClient(_tracking_uri(settings))
        self._run, self._time = self._open_mlflow_run(request, settings.experiment, identify())
        self._client.update_run(self._run, status="RUNNING")

    def log(self, rows: Sequence[StepFigures], superseded_from: int | None) -> None:
        from mlflow.entities import Metric, RunTag

        metrics = []
        for row in rows:
            self._time = max(int(time.time() * 1000), self._time + 1)  # increases even if clocks of machines differ
            metrics += [Metric(name, value, self._time, row.step) for name, value in row.figures.items()]
        logged = RunTag(_LAST_TIME_TAG, str(self._time))
        for start in range(0, len(metrics), _MAX_REQUEST_METRICS):
            self._client.log_batch(self._run, metrics[start : start + _MAX_REQUEST_METRICS], tags=[logged])

    def publish_events(self, summary: EventSummary) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"events.{kind}", str(count)) for kind, count in summary.counts.items()]
        self._client.log_batch(self._run, tags=[*tags, RunTag("mlflow.note.content", summary.text)])

    def finish(self, summary: EventSummary) -> None:
        """Set the state of a run that has finished or failed. An interrupted run keeps the state "running", because it
        may continue."""
        if summary.end is not None:
            self._client.set_terminated(self._run, _MLFLOW_STATES[summary.end])

    def _open_mlflow_run(self, request: PublishRequest, experiment: str, maskfleet_id: str) -> tuple[str, int]:
        """Return the id of the run in MLflow, and the time of the last logged values in ms."""
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([place], f"tags.`{_ID_TAG}` = '{maskfleet_id}'", max_results=1)
        if runs:
            return runs[0].info.run_id, int(runs[0].data.tags.get(_LAST_TIME_TAG, 0))
        made = self._client.create_run(place, run_name=request.name, tags={_ID_TAG: maskfleet_id})
        self._log_recipe(made.info.run_id, request)
        return made.info.run_id, 0

    def _log_recipe(self, run: str, request: PublishRequest) -> None:
        """Log the recipe as parameters. MLflow never changes parameters, so they show the recipe of the run's first
        start."""
        from mlflow.entities import Param

        values = {"run": request.uri} | request.recipe
        parameters = [Param(name, str(value)[:_MAX_PARAM_CHARACTERS]) for name, value in values.items()]
        for start in range(0, len(parameters), _MAX_REQUEST_PARAMS):
            self._client.log_batch(run, params=parameters[start : start + _MAX_REQUEST_PARAMS])


def _tracking_uri(settings: Mlflow) -> str:
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise UnusableSink("no server is named: set logging.mlflow.uri or MLFLOW_TRACKING_URI")
    if holds_login(uri):
        raise UnusableSink("MLFLOW_TRACKING_URI holds a login: set MLFLOW_TRACKING_USERNAME and _PASSWORD instead")
    return uri
