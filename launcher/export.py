"""From a run's checkpoint to a folder that `transformers` loads."""

from checkpoints.gather import Alone
from checkpoints.hf.export import export_model
from checkpoints.layout import Manifest
from checkpoints.listing import committed, read_manifest
from checkpoints.load import Reader, newest_good
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from launcher.errors import RunError
from launcher.runs import Run


def export_run(run: Run, step: int | None, out: str) -> int:
    """Export the checkpoint of `step` (None: the newest good one) to the URI `out`; returns its step.

    Raises:
        RunError: there is no such checkpoint.
        CheckpointError: it is damaged. ModelError: what was written does not read back. StoreError.
    """
    manifest = _choose(run, step)
    tokenizer = load_tokenizer(run.recipe.tokenizer.uri)
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    with Reader(run.store, manifest) as reader:
        export_model(reader.read_full, config, tokenizer.save_files(), open_store(out))
    return manifest.step


def _choose(run: Run, step: int | None) -> Manifest:
    if step is None:
        good = newest_good(run.store, Alone())
        if good is None:
            raise RunError(f"{run.uri} has no checkpoint yet", remedy=f"maskfleet train {run.uri}")
        return good.manifest
    marks = committed(run.store)
    chosen = next((mark for mark in marks if mark.step == step), None)  # the newest attempt's comes first
    if chosen is None:
        have = ", ".join(str(mark.step) for mark in marks) or "none"
        raise RunError(f"{run.uri} has no checkpoint of step {step}", remedy=f"it has: {have}")
    return read_manifest(run.store, chosen)
