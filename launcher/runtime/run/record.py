"""A run is a folder or an S3 prefix, named by its URI. Only `maskfleet init` and forks create runs.

recipe.yaml     the resolved recipe: complete, local paths made absolute
tokenizers/     its tokenizer, by fingerprint (launcher.runtime.run.kept_tokenizer)
run.json        identity of the run: fields of the recipe, fingerprints of corpora and tokenizer, versions
attempts/       one object per start (checkpoints.attempt)
checkpoints/    committed checkpoints and their data (checkpoints.layout)
kernels/        the kernels chosen for each kind of GPU (launcher.runtime.rank.kernels)
removals/       documents removed from the corpora, which steps skip (launcher.runtime.run.removals)
microbatch/     microbatch sizes that did not fit into memory (launcher.runtime.rank.microbatch_size)
metrics/ events/    segments of each attempt (launcher.runtime.run.log)
"""

import logging
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import list_committed, read_manifest
from checkpoints.verify import find_newest_good
from data_service.formats import StrictRecord
from data_service.printable import shell_word
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RunError
from launcher.runtime.recipe.load import parse_recipe
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run import outline
from launcher.runtime.run.inputs import Inputs
from launcher.runtime.run.kept_tokenizer import find_tokenizer
from launcher.runtime.run.outline import ForkOrigin
from launcher.runtime.run.removals import CorpusStates, RemovalHistory, RemovalRecord, read_removals

RECIPE_FILE, RECORD_FILE = outline.RECIPE_FILE, outline.RECORD_FILE
COMMITTED_KEY = "checkpoints/began.json"  # exists after the first checkpoint: from then on, having none is an error


class RunRecord(StrictRecord):
    """The content of run.json. It changes only if a start accepts changes (`launcher.runtime.run.create.reconcile`).

    Attributes:
        origins: checkpoints from which the run was forked, the oldest first; empty if it was not forked.
        data_begins: step that reads the first samples: 0, except in a fork whose data starts from the beginning.
    """

    format: Literal[2]
    name: str
    created: str
    identity: dict[str, object]
    fingerprint: str
    inputs: Inputs
    versions: dict[str, str]
    origins: tuple[ForkOrigin, ...] = ()
    data_begins: int = 0


@dataclass(frozen=True)
class Run:
    """An opened run: its store, its present recipe, and the record of its creation.

    Attributes:
        left_out: removal records that were added after the run was created, the oldest first.
        wanted: states of the corpora with which a start continues; None: those of the last removal record.
        stored: the run as it is stored, if the start continues with another recipe or record (`store_changes`).
    """

    uri: str
    store: Store
    recipe: Recipe
    record: RunRecord
    left_out: tuple[RemovalRecord, ...] = ()
    wanted: CorpusStates | None = None
    stored: "Run | None" = None

    @property
    def removal_history(self) -> RemovalHistory:
        """Which state of the corpora each step reads."""
        return RemovalHistory(self.record.inputs.removals, self.left_out)

    @property
    def removals(self) -> CorpusStates:
        """The state of each corpus that this run's streams read from now on."""
        return self.removal_history.newest_states if self.wanted is None else self.wanted

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that run.json names, usually from the run's own copy. Raises as
        `launcher.runtime.run.kept_tokenizer.find_tokenizer`."""
        return find_tokenizer(self.store, self.record.inputs.tokenizer, self.recipe)

    def tokenizer_for(self, recipe: Recipe) -> Tokenizer:
        """Return the run's tokenizer, or that of `recipe` if its `tokenizer` section differs. Raises as `tokenizer`."""
        if recipe.tokenizer == self.recipe.tokenizer:
            return self.tokenizer()
        return load_tokenizer(recipe.tokenizer.uri)


def open_run(uri: str) -> Run:
    """Return the existing run at `uri`.

    Raises:
        RunError: there is no run, its files are damaged, or this version cannot read their format.
        DamagedCheckpoint: a removal record is missing or damaged.
        StoreError: the store cannot be read.
    """
    store = open_store(uri)
    try:
        data = store.get(RECORD_FILE)
        record = RunRecord.model_validate_json(data)
    except KeyMissing as error:
        raise outline.no_run_error(uri) from error
    except ValidationError as error:
        raise outline.unreadable_record_error(uri, data, error) from error
    return Run(uri, store, _stored_recipe(store), record, read_removals(store))


def _stored_recipe(store: Store) -> Recipe:
    try:
        return parse_recipe(store.get(RECIPE_FILE).decode(errors="replace"), f"{store.uri.rstrip('/')}/{RECIPE_FILE}")
    except KeyMissing as error:
        raise outline.no_recipe_error(store.uri) from error


def dump_record(record: RunRecord) -> bytes:
    """Return the bytes of run.json."""
    return (record.model_dump_json(indent=1) + "\n").encode()


_log = logging.getLogger(__name__)


def select_checkpoint(run: Run, step: int | None) -> CheckpointManifest:
    """Return the manifest of the checkpoint of `step`; if several attempts saved that step, the newest attempt's.

    If `step` is None, return that of the newest intact checkpoint. Warnings name newer, damaged checkpoints.

    Raises:
        RunError: there is no such checkpoint.
        CheckpointError: the checkpoint is damaged; if `step` is None: all checkpoints are damaged.
        StoreError: the store cannot be read.
    """
    if step is None:
        good = find_newest_good(run.store, SingleRank())
        if good is None:
            raise RunError(f"{run.uri} has no checkpoint yet", remedy=f"maskfleet train {shell_word(run.uri)}")
        for damaged in good.passed_over:
            _log.warning("a newer checkpoint of %s is damaged: %s", run.uri, damaged)
        if good.passed_over:
            _log.warning("using the older checkpoint of step %s", f"{good.manifest.step:,}")
        return good.manifest
    marks = list_committed(run.store)
    chosen = next((mark for mark in marks if mark.step == step), None)  # the newest attempt comes first
    if chosen is None:
        have = ", ".join(str(mark.step) for mark in marks) or "none"
        raise RunError(f"{run.uri} has no checkpoint of step {step}", remedy=f"it has: {have}")
    return read_manifest(run.store, chosen)
