"""The parts of a recipe for trackers, webhooks and the check of weights. Secrets come from the environment, never from
a recipe."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator

from data_service.formats import StrictRecord

_CHECK_INTERVAL_STEPS = 100  # rare checks suffice where damage stays in the weights until a later check


class Wandb(StrictRecord):
    """A run of Weights & Biases. The key is in WANDB_API_KEY, or where `wandb login` leaves it.

    Attributes:
        project, entity: project and entity of the run. `entity` null: the one that the key belongs to.
        mode: `offline` writes files for `wandb sync` into the run's folder; for a run in object storage, into the
            folder that WANDB_DIR names.
    """

    project: str = Field(min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class Mlflow(StrictRecord):
    """A run of MLflow. User and password, if any, are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Attributes:
        uri: URI of the tracking server. Null: the value of MLFLOW_TRACKING_URI.
        experiment: name of the experiment, which is created if it does not exist.
    """

    uri: str | None = None
    experiment: str = Field(default="maskfleet", min_length=1)

    @field_validator("uri")
    @classmethod
    def _holds_no_secret(cls, uri: str | None) -> str | None:
        if uri is not None and holds_login(uri):
            raise ValueError(
                "a URI with a user name would put a secret on record: set MLFLOW_TRACKING_USERNAME"
            )
        return uri


def holds_login(uri: str) -> bool:
    """Return whether the URI may contain a user name or a password."""
    try:
        return "@" in urlsplit(uri).netloc
    except ValueError:
        return "@" in uri


class Events(StrictRecord):
    """The receiver of a run's events.

    Attributes:
        webhook_env: name of the environment variable of `maskfleet train` that holds the URL to which events are
            posted. None: events are not posted.
    """

    webhook_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class WeightCheck(StrictRecord):
    """How often the ranks' weights are compared. They are also compared at every commit.

    Attributes:
        every: number of steps between comparisons; null: at commits only. `auto`: 1 at ZeRO 1 and 2, where damage lasts
            only until the next update and a comparison takes two reductions; 100 at ZeRO 0, where damage stays.
    """

    every: PositiveInt | Literal["auto"] | None = "auto"

    def interval(self, zero: int) -> int | None:
        """Return the number of steps between comparisons at ZeRO stage `zero`. None: no comparisons between commits, as
        at stage 3, where each weight is on one rank only."""
        if zero == 3 or self.every is None:
            return None
        if self.every == "auto":
            return _CHECK_INTERVAL_STEPS if zero == 0 else 1
        return self.every
