"""A run of Weights & Biases.

Its own step counter only rises, so figures are drawn over a metric of ours, `step`. Where the run went back, the steps
that it repeats are logged anew: of several rows of a step the last is the run's; `times_gone_back` tells them apart.
An offline run has a folder for each start of `maskfleet train`, all of one id: `wandb sync` makes one run of them.
"""

from collections.abc import Sequence

from launcher.observe.trackers.publish import Hopeless, PublishRequest, StepFigures, Story
from launcher.runtime.recipe.operation import Wandb

_TAGS = 50  # of different events


class WandbRun:
    """See `launcher.observe.trackers.publish.Tracker`. Rows are sure only when it is finished: until then the client
    may hold them in memory."""

    sure = False

    def __init__(self, order: PublishRequest, settings: Wandb, identifier: str) -> None:
        """Raises Hopeless: there is no client, or no login."""
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

    def tell(self, story: Story) -> None:
        self._run.tags = sorted(story.counts)[:_TAGS]
        self._run.notes = story.text

    def finish(self, story: Story) -> None:
        self._run.finish(exit_code=int(story.end == "failed"))
        self._teardown()  # its own process ends
