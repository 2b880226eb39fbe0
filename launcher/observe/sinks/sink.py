"""The base class of sinks, which receive a run's records, and the request to the process that serves them.

To add a sink, write a subclass of `Sink` in a file of this folder, and add its name to `publish.SINKS`, its settings to
`PublishRequest` here and to `launcher.runtime.recipe.parts`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from launcher.runtime.recipe.parts import Mlflow, Wandb
from launcher.runtime.run.step_table import Record


class UnusableSink(Exception):
    """A sink cannot be used in this start of a run. The message tells the operator what to do."""


class PublishRequest(BaseModel):
    """A request to publish a run to a list of sinks.

    Attributes:
        uri, name: URI and name of the run.
        recipe: leaf values of its recipe by dotted path, shown as the run's configuration.
        tensorboard, wandb, mlflow, webhook_env: settings of the sinks; None or False: not used.
        folder: the run's folder, for files of clients; None if it is not on a local disk.
        poll_s: seconds between two reads of the run's store.
        began, attempts: when this start of the run began, and the newest attempt before it. The webhook posts later
            events only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    name: str
    recipe: dict[str, object]
    tensorboard: bool
    wandb: Wandb | None
    mlflow: Mlflow | None
    webhook_env: str | None
    folder: str | None
    poll_s: float
    began: float
    attempts: int

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names of the requested sinks."""
        settings = (self.tensorboard, self.wandb, self.mlflow, self.webhook_env)
        names = ("tensorboard", "wandb", "mlflow", "webhook")
        return tuple(name for name, wanted in zip(names, settings, strict=True) if wanted)


@dataclass(frozen=True)
class StepFigures:
    """The figures (losses, metrics, rates) of a step or an evaluation, by name."""

    step: int
    figures: dict[str, float]


@dataclass(frozen=True)
class EventSummary:
    """A summary of a run's events.

    Attributes:
        new: events since the last summary.
        counts: number of events by kind.
        text: the newest events, a line each.
        end: "finished", "failed", or None if the run may continue.
    """

    new: Sequence[Record] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    text: str = ""
    end: str | None = None


class Sink:
    """A receiver of a run's records. A sink whose method raises is opened again after a while.

    Attributes:
        durable: whether rows are safe when `log` returns, even if this process then dies.
        takes_figures: whether the sink receives figures of steps, by `log`.

    Args:
        identify: function that returns the run's permanent id in this sink. Raises StoreError.
        note: function that shows a failure to the operator.

    Raises:
        UnusableSink: the sink is not installed or not configured.
    """

    durable = True
    takes_figures = True

    def __init__(self, request: PublishRequest, identify: Callable[[], str], note: Callable[[str], None]) -> None: ...

    def log(self, rows: Sequence[StepFigures], superseded_from: int | None) -> None:
        """Publish the next rows. `superseded_from`: step to which the run went back; None if it did not."""

    def publish_events(self, summary: EventSummary) -> None:
        """Publish new events."""

    def finish(self, summary: EventSummary) -> None:
        """Make everything that was logged durable, and set the state of the run."""
