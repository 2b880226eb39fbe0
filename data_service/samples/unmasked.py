"""No masking: what a model makes of whole texts is compared (contrastive training)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class NoMasking(BaseModel):
    """Rows as they are, without targets; nothing is drawn, so all epochs have the same rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none"] = "none"

    @property
    def unit(self) -> Literal["token"]:
        """What masking would look at: words are not needed."""
        return "token"

    def mask_epoch(self, epoch: int) -> int:
        """The epoch whose draws are used in `epoch`: one for all."""
        return 0
