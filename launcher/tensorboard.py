"""TensorBoard event files of a run on a local disk, beside its JSONL segments (which stay the truth)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardFiles:
    """Writes below `folder`; earlier files' events from `first_step` on are purged (repeated steps)."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, and only local runs want it

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        figures = {
            name: value
            for name, value in record.items()
            if name.endswith(("loss", "accuracy", "precision", "recall", "replaced"))
        }
        figures |= {"lr": record["lr"], "grad_norm": record["grad_norm"]}
        figures |= {"tokens_per_second": record["tokens"] / max(record["seconds"], 1e-9)}
        figures |= {"data_wait_share": record["data_wait_share"]}
        self._write("train", figures, record["step"])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        figures = {
            name: value
            for name, value in record.items()
            if name.endswith(("loss", "accuracy", "precision", "recall", "replaced"))
        }
        self._write("heldout", figures, record["step"])

    def _write(self, group: str, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
