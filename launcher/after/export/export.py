"""Exports a run's checkpoint as a folder that `transformers` loads. A generator and a discriminator get a folder each.

`SentenceTransformer` can also load the folder of an encoder of text vectors, or of a model continued from one. The mean
of several checkpoints' weights is exported in the same form, and a run may start from its folder.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from checkpoints.hf.export import MODEL_CARD, ReadParameter, publish_on_exit, write_model, write_network_pair
from checkpoints.hf.folder import replaceable_files
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import is_on_lineage, list_committed, read_manifest
from checkpoints.load import CheckpointReader, MeanReader
from data_service.store.base import digest
from data_service.store.open import open_store
from encoder_core.families.catalogue import HfFormat, ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.optim.average import AVERAGE
from encoder_core.train.zero_state import MASTER
from launcher.after.export.model_card import (
    DATA_CARDS_FILE,
    CheckpointFacts,
    ExportedNetwork,
    dump_cards,
    read_checkpoint_facts,
    render_model_card,
)
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.errors import RunError
from launcher.progress import work
from launcher.runtime.recipe.corpora import corpora_by_name
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads
from launcher.runtime.recipe.timeline import causal_after, recipe_after
from launcher.runtime.run.record import Run, select_checkpoint
from launcher.runtime.run.text_vectors import find_prompts, read_kept_modules, write_modules

MEAN_SOURCES_FILE = "mean.json"
"""Name of the file in an exported mean that lists the averaged checkpoints."""


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        step: step of the checkpoint.
        models: name of the transformers class that loads each folder (None: there is none), by the folder's path
            below the export's root ("." for the root).
        left_out: parts of the run's model that the transformers class does not have.
    """

    step: int
    models: dict[str, str | None]
    left_out: tuple[str, ...]


def export_run(
    run: Run,
    step: int | None,
    out: str,
    *,
    licence: str | None = None,
    average: bool = False,
    add_files: Callable[[Path], object] = lambda folder: None,
) -> ExportResult:
    """Export the checkpoint of `step` (None: the newest good one) to the URI `out`, with a model card.

    `licence`: licence of the model for the card. `average`: whether to export the average of the weights that the run
    keeps, in their place. `add_files` adds files to the local folder of each network before all are published. Files of
    an earlier export in `out` are replaced.

    Raises what `add_files` raises, and:
        RunError: if there is no such checkpoint, or it holds no average.
        CheckpointError: if the checkpoint is damaged, or `out` holds something else.
        StoreError: if a store cannot be read or written.
        ModelError: if transformers has no such model, or the export, when it is read back, is not the same model.
    """
    replaceable_files(open_store(out))  # raises before the checkpoint is read if `out` may not be replaced
    manifest = select_checkpoint(run, step)
    if average and AVERAGE not in manifest.kinds:
        raise RunError(
            f"the checkpoint of step {manifest.step} of {run.uri} holds no average of the weights",
            remedy="a run keeps one with average.ema in its recipe; `maskfleet checkpoints average` makes the mean of "
            "checkpoints",
        )
    made = "The weights are their exponential moving average over the updates (`average.ema`)." if average else ""
    facts = read_checkpoint_facts(run, [manifest], made)
    with CheckpointReader(run.store, manifest) as reader:
        read = partial(reader.read_full, kind=AVERAGE if average else MASTER)
        return export_weights(facts, manifest, read, out, licence=licence, add_files=add_files)


def export_weights(
    checkpoint_facts: CheckpointFacts,
    manifest: CheckpointManifest,
    read_parameter: ReadParameter,
    out: str,
    *,
    licence: str | None,
    add_files: Callable[[Path], object],
) -> ExportResult:
    """Export weights of the model that a run has at a checkpoint, as `export_run` does.

    Args:
        checkpoint_facts: the facts for the card.
        manifest: the checkpoint's manifest.
        read_parameter: function that returns a whole parameter by its name in the run's module.
    """
    run, target = checkpoint_facts.run, open_store(out)
    tokenizer = run.tokenizer()
    files = tokenizer.save_files()
    trained = recipe_after(run.recipe, manifest.step).model
    config = trained.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    objective = run.recipe.objective
    networks = _exported_networks(manifest, config, objective, causal=causal_after(run.recipe, manifest.step))
    modules = read_kept_modules(run.store)
    notes = {part: _card_files(checkpoint_facts, network, licence) for part, network in networks.items()}
    with (
        work("reading the checkpoint, writing the model and comparing"),
        publish_on_exit(target) as folder,
    ):
        if objective.rtd is not None:
            sharing = objective.rtd.embeddings
            write_network_pair(folder, read_parameter, config, files, sharing, notes=notes)
        else:
            heads = exported_heads(config, objective)
            write_model(folder, read_parameter, config, files, heads, notes=notes["."])
            if objective.contrastive is not None and networks["."].architecture is not None:
                write_sentence_transformer(  # so that sentence-transformers can load the folder, too
                    folder,
                    pooling=objective.contrastive.pooling,
                    normalize=objective.contrastive.normalize,
                    max_length=config.max_length,
                    prompts=find_prompts(modules),
                )
            else:
                write_modules(folder, modules)
        for part in networks:
            add_files(folder / part)
    models = {part: network.architecture for part, network in networks.items()}
    left_out = {name for network in networks.values() for name in network.left_out}
    return ExportResult(manifest.step, models, tuple(sorted(left_out)))


def _card_files(facts: CheckpointFacts, network: ExportedNetwork, licence: str | None) -> dict[str, str]:
    """Return the model card and the data cards, by file name."""
    notes = {MODEL_CARD: render_model_card(facts, network, licence)}
    if facts.cards:
        notes[DATA_CARDS_FILE] = dump_cards(facts.cards, corpora_by_name(facts.run.recipe))
    return notes


def _exported_networks(
    manifest: CheckpointManifest, config: ModelConfig, objective: RecipeObjective, *, causal: bool
) -> dict[str, ExportedNetwork]:
    """Return the networks to export, by folder."""
    if objective.rtd is not None:
        pair: dict[str, tuple[ModelConfig, Heads]] = {
            "generator": (config.generator, "mlm"),
            "discriminator": (config, "rtd"),
        }
        return {part: _describe_network(hf_format_of(*its), part, manifest) for part, its in pair.items()}
    its = _describe_network(hf_format_of(config, exported_heads(config, objective)), None, manifest)
    return {".": replace(its, causal=causal)}


def _describe_network(hf_interchange: HfFormat, part: str | None, manifest: CheckpointManifest) -> ExportedNetwork:
    """Return the description of an exported network. `part`: its part of a pair; None if it is the only network."""
    known, prefix = hf_interchange.table.their_names(hf_interchange.layers), f"{part}." if part else ""
    names = (name.removeprefix(prefix) for name in manifest.shapes if name.startswith(prefix))
    left_out = {name.split(".")[0] for name in names if name not in known}
    return ExportedNetwork(hf_interchange.architecture, part, tuple(sorted(left_out)))


def newest_checkpoints(run: Run, count: int) -> list[CheckpointManifest]:
    """Return the newest checkpoint and the `count` - 1 before it that it continues, the oldest first.

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
            remedy="average fewer checkpoints; a run keeps more with checkpoint.keep_last or checkpoint.keep_every",
        )
    return [read_manifest(run.store, mark) for mark in reversed(marks[:count])]


def checkpoints_at_steps(run: Run, steps: Sequence[int]) -> list[CheckpointManifest]:
    """Return the checkpoints of `steps`, the oldest first. Raises as `select_checkpoint`."""
    return [select_checkpoint(run, step) for step in sorted(set(steps))]


def export_mean(
    run: Run, manifests: Sequence[CheckpointManifest], out: str, *, licence: str | None = None
) -> ExportResult:
    """Export the mean of the weights in the checkpoints `manifests`, the oldest first, to the URI `out`, in the form of
    `export_run`. The file `mean.json` lists the checkpoints with the digests of their manifests, which cover all bytes.

    Raises:
        RunError: there are fewer than two checkpoints.
        CheckpointError, StoreError, ModelError: as for `export_run`.
    """
    if len(manifests) < 2:
        raise RunError(
            f"a mean needs at least two checkpoints of {run.uri}", remedy="name two, or use `checkpoints export`"
        )
    replaceable_files(open_store(out))  # raises before the checkpoints are read if `out` may not be replaced
    steps = ", ".join(f"{manifest.step:,}" for manifest in manifests)
    made = f"The weights are the mean of those after steps {steps}; `{MEAN_SOURCES_FILE}` names the checkpoints."
    facts = read_checkpoint_facts(run, manifests, made)
    with ExitStack() as reading:
        mean = MeanReader([reading.enter_context(CheckpointReader(run.store, manifest)) for manifest in manifests])
        sources = _sources_json(run, manifests)

        def write_sources(folder: Path) -> None:
            (folder / MEAN_SOURCES_FILE).write_text(sources, encoding="utf-8")

        return export_weights(facts, manifests[-1], mean.read_full, out, licence=licence, add_files=write_sources)


def _sources_json(run: Run, manifests: Sequence[CheckpointManifest]) -> str:
    """Return the content of `mean.json`."""
    checkpoints = [
        {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "manifest": digest(run.store.get(manifest.name.manifest_key)),
        }
        for manifest in manifests
    ]
    content = {"run": run.uri, "fingerprint": run.record.fingerprint, "checkpoints": checkpoints}
    return json.dumps(content, indent=1) + "\n"
