"""The baselines that are stored with a run. `baselines.py` computes them once."""

from data_service.store.base import Store
from launcher.runtime.run.removals import CorpusStates
from launcher.runtime.run.sealed import Sealed, hash_json, read_sealed

BASELINES_KEY = "baselines.json"  # key in the run's store


class Baselines(Sealed):
    """Mean negative log-likelihood per held-out target, in nats.

    Attributes:
        targets: number of targets.
        unigram, bigram: the two losses.
        counted: number of training tokens in which the pairs were counted.
        fingerprint: what the losses depend on (`baselines_fingerprint`).
    """

    targets: int
    unigram: float
    bigram: float
    counted: int
    fingerprint: str

    @property
    def path(self) -> str:
        return BASELINES_KEY

    def losses_by_name(self) -> dict[str, float]:
        """Return the two losses by the names that pages show."""
        return {"unigram": self.unigram, "left bigram": self.bigram}


def baselines_fingerprint(run_fingerprint: str, samples: int | None, removals: CorpusStates) -> str:
    """Return the fingerprint of a run's baselines. A start may change `samples`, the recipe's `evaluation.samples`, and
    `removals`, the states of the corpora, but not the fingerprint of the run."""
    return hash_json([run_fingerprint, samples, dict(removals)])


def load_baselines(store: Store, fingerprint: str) -> Baselines | None:
    """Return the stored baselines with this fingerprint; None if there are none, or they are damaged. Raises
    StoreError; RunError if a newer version wrote them."""
    stored = read_sealed(store, BASELINES_KEY, Baselines)
    return stored if stored is not None and stored.fingerprint == fingerprint else None
