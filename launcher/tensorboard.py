"""TensorBoard event files of a run on a local disk, beside its JSONL segments (which stay the truth)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.trackers.figures import figures


class TensorBoardFiles:
    """Writes below `folder`; earlier files' events from `first_step` on are purged (repeated steps)."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, and only local runs want it

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        self._write(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        for name, value in figures(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()
