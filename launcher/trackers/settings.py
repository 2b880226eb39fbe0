"""Which trackers a run is published to, as its recipe says it. Secrets are in the environment, never in a recipe."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


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
    """Whether there may be a user name or a password in it."""
    try:
        return "@" in urlsplit(uri).netloc
    except ValueError:
        return "@" in uri
