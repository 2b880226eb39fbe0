"""From a run's checkpoint to a folder that `transformers` loads, or two for a generator and a discriminator."""

from dataclasses import dataclass

from checkpoints.hf.export import export_model
from checkpoints.hf.pair import export_pair
from checkpoints.layout import Manifest
from checkpoints.load import Reader
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.build import ModelConfig
from encoder_core.families.hf.interchange import Heads, interchange
from encoder_core.objectives.replaced import DetectorConfig
from launcher.chosen import chosen_checkpoint
from launcher.objective import Objective, exported_heads
from launcher.runs import Run


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: of the checkpoint.
        models: the class of transformers that loads each folder below the given one ("." for itself).
        left_out: parts of the run's model for which that class has no place.
    """

    step: int
    models: dict[str, str]
    left_out: tuple[str, ...]


def export_run(run: Run, step: int | None, out: str) -> Exported:
    """Export the checkpoint of `step` (None: the newest good one) to the URI `out`.

    Raises:
        RunError: there is no such checkpoint.
        CheckpointError: it is damaged. StoreError: it cannot be read, or `out` not written.
        ModelError: transformers has no such model, or what was written does not read back.
    """
    manifest = chosen_checkpoint(run, step)
    tokenizer = load_tokenizer(run.recipe.tokenizer.uri)
    files, target = tokenizer.save_files(), open_store(out)
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    objective = run.recipe.objective
    with Reader(run.store, manifest) as reader:
        if objective.rtd is not None and isinstance(config, DetectorConfig):
            export_pair(reader.read_full, config, files, target, objective.rtd.embeddings)
        else:
            export_model(reader.read_full, config, files, target, exported_heads(config, objective))
    return _described(manifest, config, objective)


def _described(manifest: Manifest, config: ModelConfig, objective: Objective) -> Exported:
    parts: dict[str, tuple[ModelConfig, Heads]] = {".": (config, exported_heads(config, objective))}
    if objective.rtd is not None and isinstance(config, DetectorConfig):
        parts = {"generator": (config.generator, "mlm"), "discriminator": (config, "rtd")}
    theirs = {folder: interchange(*part) for folder, part in parts.items()}
    models = {folder: their.architecture for folder, their in theirs.items()}
    if len(parts) > 1:
        return Exported(manifest.step, models, ())
    known = theirs["."].table.names(theirs["."].layers)
    left_out = {name.split(".")[0] for name in manifest.shapes if name not in known}
    return Exported(manifest.step, models, tuple(sorted(left_out)))
