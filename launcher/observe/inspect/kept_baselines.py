"""Reads the baselines that are stored with a run. `baselines.py` computes them once."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.formats import REMEDY, is_newer, newer
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from launcher.errors import RunError

KEY = "baselines.json"


class Baselines(BaseModel):
    """Mean negative log-likelihood per held-out target, in nats.

    Attributes:
        targets: number of targets.
        unigram, bigram: the two losses.
        counted: number of training tokens in which the pairs were counted.
        fingerprint: fingerprint of the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    targets: int
    unigram: float
    bigram: float
    counted: int
    fingerprint: str

    def named(self) -> dict[str, float]:
        """Return the two losses by the names that pages show."""
        return {"unigram": self.unigram, "left bigram": self.bigram}


def kept_baselines(store: Store, fingerprint: str) -> Baselines | None:
    """Return the baselines of the run with this fingerprint; None if the store has none of it.

    Raises:
        ValidationError: the stored baselines are damaged.
        RunError: a newer version wrote them.
        StoreError: the store cannot be read.
    """
    try:
        data = store.get(KEY)
        stored = Baselines.model_validate_json(data)
    except KeyMissing:
        return None
    except ValidationError as error:
        if is_newer(data, known=1, error=error):
            raise RunError(newer(f"{store.uri.rstrip('/')}/{KEY}"), remedy=REMEDY) from error
        raise
    return stored if stored.fingerprint == fingerprint else None
