"""Which checkpoints a run has."""

from dataclasses import dataclass

from pydantic import ValidationError

from checkpoints.layout import MANIFEST, STEPS, Manifest, Segment
from data_service.store.base import Store
from data_service.store.errors import KeyMissing


@dataclass(frozen=True)
class Unreadable:
    """A manifest that is none."""

    key: str
    step: int
    reason: str


@dataclass(frozen=True)
class Found:
    """All manifests of a run, the readable ones newest first."""

    good: list[Manifest]
    unreadable: list[Unreadable]


@dataclass(frozen=True)
class Row:
    """One line of `maskfleet checkpoints list`.

    Attributes:
        created: seconds since 1970.
        bytes: of all its files.
        abandoned: the run went on from an earlier checkpoint, so this one is not part of its history.
    """

    step: int
    attempt: int
    created: float
    bytes: int
    world_size: int
    abandoned: bool


def manifests(store: Store) -> Found:
    """Reads every manifest of the run in `store`."""
    good, unreadable = [], []
    for entry in store.list(STEPS):
        folder, _, name = entry.key.rpartition("/")
        step = folder.removeprefix(STEPS)
        if name != MANIFEST or not step.isdecimal():
            continue
        try:
            good.append(Manifest.model_validate_json(store.get(entry.key)))
        except KeyMissing:
            continue  # deleted since
        except ValidationError as error:
            unreadable.append(Unreadable(entry.key, int(step), _reason(store, entry.key, error)))
    good.sort(key=lambda manifest: manifest.order, reverse=True)
    return Found(good, unreadable)


def rows(store: Store) -> list[Row]:
    """The readable checkpoints, newest first."""
    found = manifests(store).good
    return [
        Row(
            manifest.step,
            manifest.attempt,
            manifest.created,
            manifest.bytes,
            manifest.world_size,
            not on(found[0].lineage, manifest.attempt, manifest.step),
        )
        for manifest in found
    ]


def on(lineage: tuple[Segment, ...], attempt: int, step: int) -> bool:
    """Whether the attempt's checkpoint of that step is part of the history."""
    return any(part.attempt == attempt and part.start < step <= part.stop for part in lineage)


def _reason(store: Store, key: str, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{store.uri}/{key} is no manifest: {field + ': ' if field else ''}{first['msg']}"
