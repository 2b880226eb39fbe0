"""The outline of a run: a few fields of its run.json and recipe, for commands that only read a run.

It does not import the recipe's schema, which takes half a second. Commands that train, fork or export open the whole
run instead, with all checks (`launcher.runtime.run.record`).
"""

from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.formats import NEWER_REMEDY, StrictRecord, is_from_newer_version, newer_version_message, parse_json
from data_service.printable import control_characters, escape_controls, shell_word
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from launcher.errors import RunError
from launcher.runtime.recipe.document import parse_document

RECIPE_FILE, RECORD_FILE = "recipe.yaml", "run.json"
RUN_FORMAT: Final = 2
"""Format version of all objects of a run; run.json states it. Maskfleet 0.1 and 0.2 wrote runs of format 1."""


class ForkOrigin(StrictRecord):
    """The checkpoint from which a run was forked (`launcher.runtime.run.fork`).

    Attributes:
        run, fingerprint: URI and fingerprint of the source run.
        step, attempt: step and attempt of the checkpoint.
        changes: readable diff of the identities of both runs.
    """

    run: str
    fingerprint: str
    step: int
    attempt: int
    changes: tuple[str, ...]


class _PartialModel(BaseModel):
    """Base of models that parse only some keys of a document and ignore others."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Inputs(_PartialModel):  # fingerprints, as in run.json
    corpora: dict[str, str]
    tokenizer: str
    removals: dict[str, str] = {}


class OutlineRecord(_PartialModel):
    """The fields of run.json that an outline needs."""

    format: Literal[2]
    name: str
    created: str
    fingerprint: str
    inputs: _Inputs
    versions: dict[str, str]
    origins: tuple[ForkOrigin, ...] = ()


class _UriField(_PartialModel):  # a section of the recipe with a URI
    uri: str


class _Corpus(_PartialModel):
    sources: dict[str, _UriField]


class _Phase(_PartialModel):
    steps: int
    corpora: dict[str, str] = {}


class _Evaluation(_PartialModel):
    samples: int | None = None


class _Logging(_PartialModel):
    flush_seconds: float = 30.0


class _Recipe(_PartialModel):
    name: str
    corpus: _Corpus
    tokenizer: _UriField
    phases: tuple[_Phase, ...]
    evaluation: _Evaluation = _Evaluation()
    logging: _Logging = _Logging()


@dataclass(frozen=True)
class Outline:
    """The outline of one run.

    Attributes:
        total_steps: number of steps of its recipe.
        flush_seconds: records are written to the store when they are this old, in seconds.
        evaluation_samples: largest number of held-out rows in an evaluation; None if the recipe lacks it.
        recipe: YAML text of its recipe.
        corpora, tokenizer: URI of each corpus, by name of the source, and URI of the tokenizer.
    """

    uri: str
    store: Store
    name: str
    total_steps: int
    flush_seconds: float
    evaluation_samples: int | None
    record: OutlineRecord
    recipe: str
    corpora: dict[str, str]
    tokenizer: str

    @property
    def origins(self) -> tuple[ForkOrigin, ...]:
        return self.record.origins

    def page_facts(self) -> dict[str, str]:
        """Return the rows of a table about the run, by title: fingerprints, origins, URIs of the data, versions."""
        inputs = self.record.inputs
        origins = {
            f"forked from{'' if number == 1 else f' ({number})'}": f"{origin.run} at step {origin.step:,}"
            + (f", changed: {'; '.join(line[2:] for line in origin.changes)}" if origin.changes else "")
            for number, origin in enumerate(reversed(self.origins), start=1)
        }
        corpora = {
            f"corpus {name}": f"{self.corpora.get(name, 'unknown')} ({fingerprint[:12]})"
            for name, fingerprint in inputs.corpora.items()
        }
        return {
            "run fingerprint": self.record.fingerprint[:12],
            **origins,
            **corpora,
            "tokenizer": f"{self.tokenizer} ({inputs.tokenizer[:12]})",
            **self.record.versions,
        }


def open_outline(uri: str, store: Store | None = None) -> Outline:
    """Return the outline of the run at `uri`. `store`: the store at `uri`, if it is already open.

    Raises:
        RunError: there is no run, or its files are damaged.
        StoreError: the store cannot be read.
    """
    store = store or open_store(uri)
    try:
        record = store.get(RECORD_FILE)
    except KeyMissing as error:
        raise no_run_error(uri) from error
    try:
        recipe = store.get(RECIPE_FILE)
    except KeyMissing as error:
        raise no_recipe_error(uri) from error
    return _parse_outline(uri, store, record, recipe)


def _parse_outline(uri: str, store: Store, record: bytes, recipe: bytes) -> Outline:
    try:
        made = OutlineRecord.model_validate_json(record)
    except ValidationError as error:
        raise unreadable_record_error(uri, record, error) from error
    text, name = recipe.decode(errors="replace"), f"{store.uri.rstrip('/')}/{RECIPE_FILE}"
    try:
        asked = _Recipe.model_validate(parse_document(text, name).data)
    except ValidationError as error:
        raise RunError(
            f"{name} is damaged: {error.errors()[0]['msg']}", remedy="restore recipe.yaml from a copy"
        ) from error
    return Outline(
        uri=uri,
        store=store,
        name=asked.name,
        total_steps=sum(phase.steps for phase in asked.phases),
        flush_seconds=asked.logging.flush_seconds,
        evaluation_samples=asked.evaluation.samples,
        record=made,
        recipe=text,
        corpora={source: place.uri for source, place in asked.corpus.sources.items()}
        | {
            f"phases.{number}.corpora.{source}": uri
            for number, phase in enumerate(asked.phases)
            for source, uri in phase.corpora.items()
        },
        tokenizer=asked.tokenizer.uri,
    )


def open_unused_store(uri: str) -> Store:
    """Open the store at `uri` for a new run. Raises RunError if it has a run, or if the URI has control characters."""
    store = open_store(uri)
    if found := control_characters(uri):
        raise RunError(
            f"{escape_controls(uri)}: the URI of a run must not have control characters, but has {', '.join(found)}",
            remedy="choose a URI of letters, digits, spaces and punctuation",
        )
    if store.size(RECORD_FILE) is not None:
        raise RunError(
            f"there is a run at {uri} already",
            remedy=f"maskfleet train {shell_word(uri)} continues it; choose another URI for a new run",
        )
    return store


def no_run_error(uri: str) -> RunError:
    return RunError(f"there is no run at {uri}", remedy="check the URI; to create a run: maskfleet init RECIPE RUN")


def no_recipe_error(uri: str) -> RunError:
    return RunError(f"{uri} has a {RECORD_FILE} but no {RECIPE_FILE}", remedy="restore recipe.yaml from a copy")


def unreadable_record_error(uri: str, record: bytes, error: ValidationError) -> RunError:
    """Return the error to raise if parsing `record`, the bytes of run.json, failed with `error`."""
    where = f"{uri.rstrip('/')}/{RECORD_FILE}"
    if version := _former_version(record):
        return RunError(
            f"{where} was written by maskfleet {version}, whose runs this version cannot read",
            remedy=f"use maskfleet {version}; or use it to export a checkpoint (maskfleet checkpoints export "
            f"{shell_word(uri)} --out FOLDER), and create a new run with start: FOLDER. Corpora and tokenizers stay "
            "valid",
        )
    if is_from_newer_version(record, known=RUN_FORMAT, error=error):
        return RunError(newer_version_message(where), remedy=NEWER_REMEDY)
    return RunError(f"{where} is damaged: {error.errors()[0]['msg']}", remedy="restore it from a copy")


def _former_version(record: bytes) -> str | None:
    """Return the Maskfleet version that wrote `record`, if that is a run.json of format 1; else None."""
    try:
        content = parse_json(record)
    except ValueError:
        return None
    if not isinstance(content, dict) or "versions" not in content or content.get("format", 1) != 1:
        return None
    versions = content["versions"]
    return str(versions.get("maskfleet", "0.2.0")) if isinstance(versions, dict) else None


def runs_at(uri: str, store: Store | None = None) -> list[str]:
    """Return `[uri]` if `uri` is a run, else the URIs of the runs in the folder `uri`, sorted by name.

    Raises:
        RunError: there is no run. StoreError: the store cannot be read.
    """
    store = store or open_store(uri)
    if store.size(RECORD_FILE) is not None:
        return [uri]
    root = uri.rstrip("/")
    names = [name for name in store.folders() if store.size(f"{name}/{RECORD_FILE}") is not None]
    if not names:
        raise RunError(
            f"there is no run at {uri}, nor directly below it",
            remedy="check the URI; to create a run: maskfleet init RECIPE RUN",
        )
    return [f"{root}/{name}" for name in names]
