"""A run's baselines as its store keeps them: `baselines.py` computes them once, everything that shows them reads them
here."""

from pydantic import BaseModel, ConfigDict

from data_service.store.base import Store
from data_service.store.errors import KeyMissing

KEY = "baselines.json"


class Baselines(BaseModel):
    """Mean negative log-likelihood per held-out target, in nats.

    Attributes:
        targets: how many.
        unigram, bigram: the two losses.
        counted: training tokens that the pairs were counted in.
        fingerprint: the run they belong to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: int
    unigram: float
    bigram: float
    counted: int
    fingerprint: str

    def named(self) -> dict[str, float]:
        """The two losses as pages call them."""
        return {"unigram": self.unigram, "left bigram": self.bigram}


def kept_baselines(store: Store, fingerprint: str) -> Baselines | None:
    """Those of the run with this fingerprint, None if they are not there.

    Raises:
        ValidationError: what is there is damaged. StoreError: the store cannot be read.
    """
    try:
        stored = Baselines.model_validate_json(store.get(KEY))
    except KeyMissing:
        return None
    return stored if stored.fingerprint == fingerprint else None
