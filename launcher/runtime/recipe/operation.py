"""The parts of a recipe that say who is told of a run, and how its weights are checked. Secrets come from the
environment, never from a recipe."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

_LASTING = 100  # steps; where damage stays, it is found later, too


class Wandb(BaseModel):
    """A run of Weights & Biases. The key is in WANDB_API_KEY, or where `wandb login` leaves it.

    Attributes:
        project, entity: where the run is; `entity` null is the key's own.
        mode: `offline` writes files for `wandb sync`: into the run's folder, or for a run in object storage where
            WANDB_DIR says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class Mlflow(BaseModel):
    """A run of MLflow. User and password, if any, are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Attributes:
        uri: of the tracking server; null is what MLFLOW_TRACKING_URI says.
        experiment: its name; made if it is not there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class Events(BaseModel):
    """Who is told of a run's events.

    Attributes:
        webhook_env: the environment variable of `maskfleet train` that holds the URL to post them to; None: nobody.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    webhook_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class WeightCheck(BaseModel):
    """Steps from one comparison of the ranks' weights to the next; every commit has one, whatever this says.

    Attributes:
        every: `auto`: each step at ZeRO 1 and 2, where damage lasts until the next update only and a look takes
            two reductions; every 100 steps at ZeRO 0, where it lasts. Null: at commits only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: PositiveInt | Literal["auto"] | None = "auto"

    def interval(self, zero: int) -> int | None:
        """In steps at ZeRO stage `zero`; None for never. Stage 3 holds nothing twice that could be compared."""
        if zero == 3 or self.every is None:
            return None
        if self.every == "auto":
            return _LASTING if zero == 0 else 1
        return self.every
