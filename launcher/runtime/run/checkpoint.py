"""Chooses the checkpoint that a command is about: the one of a step, or the newest that verifies."""

import logging

from checkpoints.gather import Alone
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import committed, read_manifest
from checkpoints.load import newest_good
from data_service.visible import shell_word
from launcher.errors import RunError
from launcher.runtime.run.record import Run

_log = logging.getLogger(__name__)


def select_checkpoint(run: Run, step: int | None) -> CheckpointManifest:
    """The checkpoint of `step`; if several attempts saved that step, the newest attempt's. `step` None: the newest
    checkpoint that verifies; newer ones that do not are named in a warning.

    Raises:
        RunError: there is no such checkpoint.
        CheckpointError: it, or all of them, are damaged. StoreError: they cannot be read.
    """
    if step is None:
        good = newest_good(run.store, Alone())
        if good is None:
            raise RunError(
                f"{run.uri} has no checkpoint yet", remedy=f"maskfleet train {shell_word(run.uri)}"
            )
        for damaged in good.passed_over:
            _log.warning("a newer checkpoint of %s is damaged: %s", run.uri, damaged)
        if good.passed_over:
            _log.warning("so the checkpoint of step %s is taken", f"{good.manifest.step:,}")
        return good.manifest
    marks = committed(run.store)
    chosen = next((mark for mark in marks if mark.step == step), None)  # the newest attempt's comes first
    if chosen is None:
        have = ", ".join(str(mark.step) for mark in marks) or "none"
        raise RunError(f"{run.uri} has no checkpoint of step {step}", remedy=f"it has: {have}")
    return read_manifest(run.store, chosen)
