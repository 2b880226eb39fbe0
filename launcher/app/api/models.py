"""Loads a run's checkpoint as a model of the transformers library."""

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.hf.folder import PAIR_FOLDERS
from data_service.processes import temporary_folder
from launcher.after.export.export import export_run
from launcher.after.finetune.pretrained import require_transformers_class
from launcher.errors import RunError, import_optional
from launcher.runtime.run.record import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_transformers_model(run: Run, step: int | None, part: str | None) -> "PreTrainedModel":
    """Return a checkpoint as a transformers model; see `launcher.app.api.run.Run.transformers_model`.

    The checkpoint is exported to a temporary folder, verified, and loaded from there.
    """
    transformers = import_optional("transformers", "a model of transformers")
    with temporary_folder("model") as folder:
        models = export_run(run, step, str(folder)).models
        chosen = part or (PAIR_FOLDERS[1] if PAIR_FOLDERS[1] in models else ".")
        if chosen not in models:
            have = ", ".join(name for name in models if name != ".") or "one network, and no parts"
            raise RunError(f"{run.uri} has no part {part!r}", remedy=f"it has: {have}")
        require_transformers_class(Path(folder, chosen), run.uri)
        model: PreTrainedModel = getattr(transformers, str(models[chosen])).from_pretrained(Path(folder, chosen))
    return model
