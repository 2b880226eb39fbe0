"""Small real runs for tests: text of our own making, a tokenizer, a corpus, and a recipe of a few steps."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName, encode_manifest
from checkpoints.listing import read_manifest
from checkpoints.load import CheckpointReader
from checkpoints.verify import find_newest_good
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.store.base import Store
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run, reconcile, store_changes
from launcher.runtime.run.following import unread_segments
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.segments import METRICS, list_segments
from launcher.runtime.run.step_table import NotARecord, Record, parse_records
from tests.support.data.made_up import write_text


def prepare_corpus(folder: Path, root: str | None = None, *, documents: int = 30, block_tokens: int = 256) -> None:
    """Text in `folder`; `root`/tokenizer and `root`/corpus (default: beside it; may be s3://)."""
    text, root = folder / "text.jsonl", root or str(folder)
    write_text(text, documents)
    texts = (json.loads(line)["text"] for line in text.open())
    save_tokenizer(train_tokenizer("byte_bpe", texts, 320), f"{root}/tokenizer")
    build_text(text, f"{root}/corpus", f"{root}/tokenizer", block_tokens=block_tokens)


def build_text(text: Path, corpus: str, tokenizer: str, *, block_tokens: int = 256, **options: Any) -> None:
    """A corpus of a file; a tenth is held out unless `options` say another share."""
    chosen = BuildOptions(**{"heldout_fraction": 0.1, "block_tokens": block_tokens} | options)
    build_corpus([str(text)], corpus, tokenizer, chosen, lambda progress: None)


SETTINGS = (
    "corpus.heldout.fraction=0.1",
    "phases=[{steps: 8, length: 32, batch: {sequences: 12}}, {steps: 6, length: 64, batch: {sequences: 8}}]",
    "microbatch=4",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.feed_forward=64",
    "model.max_length=64",
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "schedule.warmup=3",
    "checkpoint={every: {steps: 3}, keep_last: 3}",
    "evaluation={every: {steps: 7}, samples: 20}",
    "logging={flush_seconds: 1000, tensorboard: false}",
    "data_service={workers: 1, memory: 64MiB}",
    "stage3_persistence=0",
    "recovery.spares=0",  # each would load torch beside a test that needs none
)
STEPS = 14
SMALL = str(Path(__file__).with_name("small.yaml"))  # a RoBERTa; SETTINGS make it smaller


def new_run(root: Path | str, name: str, *settings: str) -> str:
    """A fresh run over the corpus at `root`, beside it; returns its URI."""
    places = (f"corpus.sources.text.uri={root}/corpus", f"tokenizer.uri={root}/tokenizer")
    uri = f"{root}/{name}"
    create_run(load(SMALL, (*places, *SETTINGS, *settings)), uri, datetime.now(UTC))
    return uri


def operate(uri: str, *settings: str) -> None:
    """Change how a run is operated, as `maskfleet train --set` does."""
    from launcher.runtime.recipe.load import with_assignments

    run = open_run(uri)
    reconciled(run, recipe=with_assignments(run.recipe, settings))


def reconciled(
    run: Run,
    *,
    recipe: Recipe | None,
    accept_changes: bool = False,
    now: datetime | None = None,
    without_removed: bool = False,
) -> Run:
    """The run as a start goes on with it, once it has claimed it: changes are written."""
    moment = now or datetime.now(UTC)
    ready = reconcile(run, recipe=recipe, accept_changes=accept_changes, now=moment, without_removed=without_removed)
    store_changes(ready, moment)
    return ready


@dataclass(frozen=True)
class ListedHistory:
    """The committed lineage as `History` has it, its step records whole and one by one."""

    steps: list[Record]
    evaluations: tuple[Record, ...]
    events: tuple[Record, ...]
    repeated: int


def history(uri: str) -> ListedHistory:
    store = open_run(uri).store
    found, steps = read_history(store), step_records(store)
    assert [record["step"] for record in steps] == found.steps.numbers.tolist()
    return ListedHistory(steps, found.evaluations, found.events, found.repeated)


def events(uri: str, kind: str) -> list[Record]:
    """The events of one kind, of the committed lineage."""
    return [event for event in read_history(open_run(uri).store).events if event["kind"] == kind]


def step_records(store: Store) -> list[Record]:
    """The step records of the committed lineage, whole."""
    kept: list[Record] = []
    for attempt, stretches in list_segments(store, f"{METRICS}/").items():
        for _, name, data in unread_segments(store, METRICS, attempt, -1, [], stretches):
            for _, record in parse_records(name, data):
                assert not isinstance(record, NotARecord)
                if record["kind"] == "step":
                    kept = [earlier for earlier in kept if earlier["step"] < record["step"]]
                    kept.append(record)
    return kept


def losses(uri: str) -> list[float]:
    """Per step, along the committed lineage; fails where a step is missing."""
    steps = history(uri).steps
    assert [record["step"] for record in steps] == list(range(len(steps)))
    return [record["loss"] for record in steps]


def ledger(uri: str) -> list[tuple[int, int, int]]:
    """(epoch, start, stop) of all samples trained on, in order, along the committed lineage."""
    return [tuple(span) for record in history(uri).steps for span in record["samples"]]


def digests(uri: str) -> list[int]:
    """Checksums of the bytes each step trained on."""
    return [record["digest"] for record in history(uri).steps]


def ensure_same(uri: str, undisturbed: str, step: int) -> None:
    """Losses, samples, the bytes of every step, and the state at `step`: all of the run that nobody disturbed."""
    assert losses(uri) == losses(undisturbed)
    assert ledger(uri) == ledger(undisturbed)
    assert digests(uri) == digests(undisturbed)
    assert final_state(uri, step) == final_state(undisturbed, step)


def ensure_whole(uri: str) -> None:
    """Every sample of every epoch in its turn: none left out, none twice."""
    for (epoch, _, stop), (next_epoch, start, _) in pairwise(ledger(uri)):
        assert (next_epoch, start) in ((epoch, stop), (epoch + 1, 0))


def with_torch(store: Store, mark: CheckpointName, release: str) -> None:
    """Let a checkpoint have been written by this release of torch."""
    manifest = read_manifest(store, mark)
    versions = manifest.versions | {"torch": release}
    store.put(mark.manifest_key, encode_manifest(manifest.model_copy(update={"versions": versions})))


def final_state(uri: str, step: int = STEPS) -> dict[tuple[str, str], bytes]:
    """(parameter, kind) -> bytes of the newest checkpoint, which must be of `step`."""
    store = open_run(uri).store
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.step == step
    with CheckpointReader(store, good.manifest) as reader:
        return {
            (name, kind): reader.read_full(name, kind).numpy().tobytes()
            for name in good.manifest.shapes
            for kind in good.manifest.state_kinds_of(name)
        }
