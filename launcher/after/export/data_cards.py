"""The data cards of a run's corpora. An export keeps them as `data_cards.json`, for those who have only the model."""

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.corpus.corpus import open_corpus
from data_service.corpus.data_card import DataCard, make_card
from data_service.errors import CorpusError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError
from launcher.runtime.recipe.corpora import corpora_of
from launcher.runtime.run.record import Run

DATA_CARDS = "data_cards.json"


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    sources: dict[str, DataCard | None]


def run_cards(run: Run) -> dict[str, DataCard | None]:
    """Return the data cards of a run's corpora, by source.

    None for a corpus that cannot be read, or that is another one than the run's.
    """
    return {name: _card(run, name) for name in corpora_of(run.recipe)}


def _card(run: Run, name: str) -> DataCard | None:
    try:
        card = make_card(open_corpus(corpora_of(run.recipe)[name].uri))
    except (CorpusError, StoreError):
        return None
    return card if card.fingerprint == run.record.inputs.corpora[name] else None


def dump_cards(cards: Iterable[tuple[str, DataCard]], sources: Iterable[str]) -> str:
    """Return the text of `data_cards.json`. `sources`: names of all sources, also of those without a card."""
    kept = _Kept(sources=dict.fromkeys(sources) | dict(cards))
    return kept.model_dump_json(indent=1) + "\n"


def read_cards(store: Store) -> Mapping[str, DataCard | None] | None:
    """Return the cards in the folder of an exported model; None if it has none that can be read. Raises StoreError."""
    try:
        return _Kept.model_validate_json(store.get(DATA_CARDS)).sources
    except (KeyMissing, ValidationError):
        return None
