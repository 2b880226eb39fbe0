"""Publishes a run to Weights & Biases.

W&B's own step counter only increases, so figures are plotted over our metric `step`. If a run goes back, the repeated
steps are logged again. Of several rows of a step the last one counts; `times_gone_back` tells them apart. An
offline run has a folder for each start of `maskfleet train`, all with one id; `wandb sync` merges them into one run.
"""

import os
from collections.abc import Callable, Sequence

from launcher.observe.sinks.sink import EventSummary, PublishRequest, Sink, StepFigures, UnusableSink

_MAX_TAGS = 50  # largest number of tags; each kind of event becomes a tag


class WandbRun(Sink):
    """A sink that logs to a run of W&B. Rows are durable only after `finish`."""

    durable = False

    def __init__(self, request: PublishRequest, identify: Callable[[], str], *_: object) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UnusableSink(f"{error}: install maskfleet[wandb]") from error
        settings = request.wandb
        assert settings is not None
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True)
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                dir=request.folder if "WANDB_DIR" not in os.environ else None,
                id=identify(),
                resume="allow",
                name=request.name,
                config=request.recipe | {"run": request.uri},
                settings=quiet,
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UnusableSink(f"{error}: set WANDB_API_KEY, or mode: offline") from error
        self._teardown = wandb.teardown
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, rows: Sequence[StepFigures], superseded_from: int | None) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.figures})

    def publish_events(self, summary: EventSummary) -> None:
        self._run.tags = sorted(summary.counts)[:_MAX_TAGS]
        self._run.notes = summary.text

    def finish(self, summary: EventSummary) -> None:
        self._run.finish(exit_code=int(summary.end == "failed"))
        self._teardown()  # ends wandb's own process
