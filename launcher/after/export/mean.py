"""Exports the mean of the weights of several checkpoints of a run. A run may start from the exported folder."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from checkpoints.hf.folder import replaceable_files
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import is_on_lineage, list_committed, read_manifest
from checkpoints.load import Reader
from checkpoints.mean import MeanReader
from data_service.store.base import digest
from data_service.store.open import open_store
from launcher.after.export.export import Exported, export_weights
from launcher.after.export.model_card import read_facts
from launcher.errors import RunError
from launcher.runtime.run.record import Run, select_checkpoint

SOURCES_FILE = "mean.json"
"""Name of the file in the exported folder that says of which checkpoints it is the mean."""


def newest_checkpoints(run: Run, count: int) -> list[CheckpointManifest]:
    """Return the newest `count` checkpoints of the run's present history, the oldest first.

    Raises:
        RunError: the run has fewer.
        CheckpointError: one is damaged.
        StoreError: the store cannot be read.
    """
    marks = list_committed(run.store)
    lineage = read_manifest(run.store, marks[0]).lineage if marks else ()
    marks = [mark for mark in marks if is_on_lineage(lineage, mark)]
    if len(marks) < count:
        raise RunError(
            f"{run.uri} has {len(marks)} checkpoints, not {count}",
            remedy="average fewer; a run keeps more with checkpoint.keep_last or checkpoint.keep_every in its recipe",
        )
    return [read_manifest(run.store, mark) for mark in reversed(marks[:count])]


def checkpoints_of(run: Run, steps: Sequence[int]) -> list[CheckpointManifest]:
    """Return the checkpoints of `steps`, the oldest first. Raises as `select_checkpoint`."""
    return [select_checkpoint(run, step) for step in sorted(set(steps))]


def export_mean(
    run: Run, manifests: Sequence[CheckpointManifest], out: str, *, licence: str | None = None
) -> Exported:
    """Export the mean of the weights in these checkpoints, the oldest first, to the URI `out`, as `export_run` exports
    one. Its file `mean.json` names them with the digests of their manifests, which hold the digests of all their bytes.

    Raises:
        RunError: there are fewer than two checkpoints.
        CheckpointError, StoreError, ModelError: as for `export_run`.
    """
    if len(manifests) < 2:
        raise RunError(
            f"a mean needs at least two checkpoints of {run.uri}", remedy="name more of them, or use `export`"
        )
    replaceable_files(open_store(out))  # known before the checkpoints are read
    steps = ", ".join(f"{manifest.step:,}" for manifest in manifests)
    made = f"The weights are the mean of those after steps {steps}; `{SOURCES_FILE}` names the checkpoints."
    facts = read_facts(run, manifests, made)
    with ExitStack() as reading:
        mean = MeanReader([reading.enter_context(Reader(run.store, manifest)) for manifest in manifests])
        sources = _sources_json(run, manifests)

        def complete(folder: Path) -> None:
            (folder / SOURCES_FILE).write_text(sources, encoding="utf-8")

        return export_weights(facts, manifests[-1], mean.read_full, out, licence=licence, complete=complete)


def _sources_json(run: Run, manifests: Sequence[CheckpointManifest]) -> str:
    """Return the content of `mean.json`."""
    checkpoints = [
        {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "manifest": digest(run.store.get(manifest.name.manifest)),
        }
        for manifest in manifests
    ]
    content = {"run": run.uri, "fingerprint": run.record.fingerprint, "checkpoints": checkpoints}
    return json.dumps(content, indent=1) + "\n"
