"""The facts of a run that its certificate states, read from the run's store.

What a chain names, in order: the record of the run, its recipe, each corpus, the tokenizer, other inputs, each start
with the code that ran on its nodes, each change that the operator made, and each commit with digests of its weights and
of the data that it has read.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from checkpoints.layout import ROOT, CheckpointManifest, CheckpointName
from checkpoints.listing import folders, read_manifest, rewinds, skips
from checkpoints.load import Reader
from checkpoints.ownership import presence
from data_service.store.base import Store, together
from data_service.store.errors import KeyMissing, Truncated
from launcher.after.certificate.signature import ENVELOPE
from launcher.after.certificate.statement import (
    CERTIFICATE,
    CHUNK,
    CertifiedFile,
    Facts,
    canonical,
    name_of_commit,
    sha256,
)
from launcher.runtime.run.log import OPERATOR
from launcher.runtime.run.outline import RECIPE, RECORD
from launcher.runtime.run.record import Run
from launcher.runtime.run.removals import LeftOut
from launcher.runtime.run.segments import EVENTS, METRICS, PACKED, Pack, read, segment_prefix, stored

LOGS = (METRICS, EVENTS)
_DATA = (
    "seed",
    "corpus.",
    "input.",
    "shuffle",
    "mixing.",
    "phases.",
)  # identity fields that decide what is read

Report = Callable[[int], None]
"""A function that is called, from several threads, with the number of bytes that were just read."""


@dataclass(frozen=True)
class LogLine:
    """A record of the run's log, and the attempt that wrote it."""

    attempt: int
    record: dict[str, JsonValue]


def facts_of_inputs(run: Run, record: bytes, recipe: bytes) -> Iterator[tuple[str, Facts]]:
    """Yield the facts about a run and its inputs. `record`, `recipe`: bytes of run.json and of recipe.yaml."""
    made, inputs = run.record, run.record.inputs
    yield (
        "run",
        {
            RECORD: sha256(record),
            "name": made.name,
            "fingerprint": made.fingerprint,
            "created": made.created,
            "versions": dict[str, JsonValue](made.versions),
            "origins": [origin.model_dump(mode="json") for origin in made.origins],
        },
    )
    yield "recipe", {RECIPE: sha256(recipe)}
    for name, content in (inputs.fields() | inputs.manifest_fields(inputs)).items():
        yield name, {"digest": str(content)}


def facts_of_log(lines: list[LogLine]) -> Iterator[tuple[str, Facts]]:
    """Yield the facts about the starts of a run and about its operator's changes. `lines`: the events."""
    nodes: dict[int, dict[str, JsonValue]] = {}
    for line in lines:
        if line.record.get("kind") == "preflight":
            nodes.setdefault(line.attempt, {})[str(line.record.get("host"))] = line.record.get("versions")
    for line in lines:
        if line.record.get("kind") == "start" and line.attempt != OPERATOR:
            where = {"versions": nodes.get(line.attempt, {})}
            yield f"attempt {line.attempt}, start at step {line.record.get('step')}", {**line.record, **where}
        if line.record.get("kind") == "removals":
            step = line.record.get("step")
            yield f"attempt {line.attempt}, without removed documents from step {step}", line.record
    changes = (line.record for line in lines if line.attempt == OPERATOR)
    for number, record in enumerate(changes):
        yield f"event {number} between attempts", record


def facts_of_commit(
    run: Run, manifest: CheckpointManifest, stored_manifest: bytes, changed: float
) -> tuple[str, Facts]:
    """Return the facts about a commit. Reads its weights.

    Args:
        stored_manifest: bytes of its manifest.
        changed: time of the latest change of the run's identity (seconds since 1970), -inf if there was none. The data
            that earlier commits have read cannot be told from the present record.

    Raises:
        DamagedCheckpoint: stored weights do not match the manifest's hashes.
        StoreError: the store does not answer.
    """
    facts: Facts = {
        "manifest": sha256(stored_manifest),
        "weights": weights_digest(run.store, manifest),
        "data": data_digest(run, manifest) if manifest.created > changed else None,
        "ranks": manifest.world_size,
        "created": manifest.created,
        "versions": dict[str, JsonValue](manifest.versions),
    }
    return name_of_commit(manifest.mark), facts


def identity_changed(lines: list[LogLine]) -> float:
    """Return when the run's identity last changed (seconds since 1970); -inf if it never did. `lines`: the events."""
    changes = (line.record for line in lines if line.record.get("kind") == "identity_changed")
    return max((float(str(record["time"])) for record in changes), default=-math.inf)


def weights_digest(store: Store, manifest: CheckpointManifest) -> str:
    """Return the sha256 of a commit's weights: names, shapes and bits. It does not depend on ranks or ZeRO stages.

    A teacher of these weights has the same digest (`launcher.runtime.run.teachers`). Raises as `facts_of_commit`.
    """
    digest = hashlib.sha256()
    with Reader(store, manifest) as reader:
        for name, shape in sorted(manifest.shapes.items()):
            digest.update(json.dumps([name, list(shape)]).encode())
            digest.update(np.ascontiguousarray(reader.read_full(name).numpy()).data)
    return digest.hexdigest()


def data_digest(run: Run, manifest: CheckpointManifest) -> str:
    """Return the sha256 of what decides which samples a commit has read.

    That is the content of corpora and tokenizer, the settings of the data, the number of steps, what was skipped, and
    which removed documents were left out.
    Samples are a function of these (shared contract of `data_service`), so no row is read for it.
    """
    record = run.record
    settings = {name: value for name, value in record.identity.items() if name.startswith(_DATA)}
    content = record.inputs.fields()
    skipped = [list(span) for span in skips(manifest, rewinds(run.store))]
    further = [[one.step, one.states] for one in run.left_out if _read_without(one, manifest)]
    left_out = [further] if further else []  # of other runs the digest stays the same
    return sha256(canonical([content, settings, record.data_begins, manifest.step, skipped, *left_out]))


def _read_without(record: LeftOut, manifest: CheckpointManifest) -> bool:
    """Return whether steps of a commit were taken without the documents that a record leaves out."""
    return record.step < manifest.step and record.attempt <= manifest.attempt


def commits(store: Store) -> list[CheckpointName]:
    """Return all commits in the store, the oldest first, also those that a rewind abandoned."""
    return sorted(folder.mark for folder in folders(store) if folder.committed)


def read_commit(store: Store, mark: CheckpointName) -> tuple[CheckpointManifest, bytes]:
    """Return a commit's manifest, and its bytes as stored. Raises as `read_manifest`."""
    return read_manifest(store, mark), store.get(mark.manifest)


def hash_files(store: Store, sizes: Mapping[str, int], report: Report) -> dict[str, CertifiedFile]:
    """Return the digests of objects, by key, without those that are no longer there as they were listed.

    `sizes`: bytes of each object, by key. Raises StoreError.
    """
    keys = sorted(sizes)
    hashed = together(lambda key: _hash_file(store, key, sizes[key], report), keys)
    return {key: file for key, file in zip(keys, hashed, strict=True) if file is not None}


def _hash_file(store: Store, key: str, size: int, report: Report) -> CertifiedFile | None:
    digests = []
    for start in range(0, size, CHUNK):
        length = min(CHUNK, size - start)
        try:
            digests.append(sha256(store.get_range(key, start, length)))
        except (KeyMissing, Truncated):
            return None
        report(length)
    return CertifiedFile(size=size, sha256=tuple(digests))


def other_files(store: Store, known: Container[str]) -> dict[str, int]:
    """Return the objects that `Predicate.files` holds, and their sizes: all but segments, ranks' files, certificates.

    Files that a start writes again and again are left out while it runs, unless they are `known` from before: its
    heartbeat, those of TensorBoard.
    """
    found = presence(store, time.time())
    changing: tuple[str, ...] = ()
    if found is not None and found.state == "running":
        changing = ("tensorboard/", f"attempts/{found.attempt:06d}.heartbeat")
    return {
        entry.key: entry.size
        for entry in store.list()
        if _is_listed(entry.key) and (entry.key in known or not entry.key.startswith(changing))
    }


def _is_listed(key: str) -> bool:
    if key.startswith(ROOT):
        return not key.endswith(".safetensors")
    if key.startswith(LOGS):
        return key.endswith(PACKED)
    return key not in (CERTIFICATE, ENVELOPE, "attempts/stop.json")


def hash_segments(store: Store) -> dict[str, tuple[str, ...]]:
    """Return the digest of every segment of the log in order, by its prefix.

    Raises:
        RunError: a pack of segments is damaged, or a newer version wrote it.
        StoreError: the store cannot be read.
    """
    found = {}
    for folder in LOGS:
        for attempt in stored(store, f"{folder}/"):
            contents = (data for _, data in segments(store, folder, attempt))
            found[segment_prefix(folder, attempt)] = tuple(sha256(data) for data in contents)
    return found


def segments(store: Store, folder: str, attempt: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each segment of an attempt, packed or not. Raises as `hash_segments`."""
    after = -1
    for stretch, data in read(store, folder, attempt):
        contents = Pack(store, stretch).contents() if data is None else iter([(stretch.first, data)])
        for number, content in contents:
            if number > after:
                yield number, content
                after = number


def events(store: Store) -> list[LogLine]:
    """Return the events of the run's log. Lines that are no JSON are left out. Raises as `hash_segments`."""
    found = []
    for attempt in stored(store, f"{EVENTS}/"):
        for _, data in segments(store, EVENTS, attempt):
            found += [LogLine(attempt, record) for record in _records(data)]
    return found


def _records(data: bytes) -> Iterator[dict[str, JsonValue]]:
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
