"""Cells that are cheap and real: a logistic regression on made-up data, whose noise the checkpoint's weights set."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from launcher.after.evaluate.cell import Cell, CellFigures
from launcher.after.finetune.pretrained import LocalModel, folder_digest


@dataclass(frozen=True)
class Fitting:
    """scikit-learn's logistic regression at learning rate `lr` (its C).

    Attributes:
        task: a name, which the data are drawn by.
        lr: of the grid.
        diary: a file to which each computation appends when it begins and when it has ended; "" for none.
        seconds: how long it takes at least, of the processor.
        dies: the process that begins it first is killed.
    """

    task: str
    lr: float
    diary: str = ""
    seconds: float = 0.0
    dies: bool = False

    kind = "fitting"
    seeded = True

    @property
    def data(self) -> str:
        return hashlib.sha256(self.task.encode()).hexdigest()

    @property
    def settings(self) -> dict[str, object]:
        return {"lr": self.lr, "examples": 200}

    def measure(self, pretrained: LocalModel, seed: int, place: Path) -> CellFigures:
        from sklearn.linear_model import LogisticRegression

        name = f"{pretrained.digest} {self.task} {self.lr} {seed}"
        self._note("begins", name)
        noise = json.loads((pretrained.folder / "config.json").read_text())["noise"]
        draw = np.random.default_rng([seed, *self.data.encode()])
        features, direction = draw.normal(size=(200, 6)), draw.normal(size=6)
        labels = features @ direction + noise * draw.normal(size=200) > 0
        model = LogisticRegression(C=self.lr).fit(features[:100], labels[:100])
        until = time.process_time() + self.seconds
        while time.process_time() < until:
            np.linalg.svd(draw.normal(size=(60, 60)))
        self._note("ends", name)
        accuracy = float(model.score(features[100:], labels[100:]))
        return CellFigures(metrics={"accuracy": accuracy, "norm": float(np.linalg.norm(model.coef_))})

    def _note(self, what: str, name: str) -> None:
        """One write, so lines of several processes do not mix. With what `begins`: the processes that have begun the
        same cell before and still live."""
        if not self.diary:
            return
        earlier = [line for line in diary(Path(self.diary)) if (line["what"], line["cell"]) == (what, name)]
        living = [line["pid"] for line in earlier if _lives(line["pid"], line["started"])]
        me = psutil.Process()
        record = {"what": what, "cell": name, "pid": me.pid, "started": me.create_time(), "living": living}
        handle = os.open(self.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, (json.dumps(record) + "\n").encode())
        os.close(handle)
        if self.dies and what == "begins" and not earlier:
            os.kill(me.pid, signal.SIGKILL)


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def checkpoints(folder: Path, noises: Iterable[float]) -> list[LocalModel]:
    """Folders that differ in one number."""
    return list(_checkpoints(folder, noises))


def _checkpoints(folder: Path, noises: Iterable[float]) -> Iterator[LocalModel]:
    for noise in noises:
        place = folder / f"model-{noise}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps({"noise": noise}))
        yield LocalModel(str(place), None, place, folder_digest(place))


def diary(path: Path) -> list[dict[str, Any]]:
    """What computations have noted."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell(**values: object) -> Cell:
    """A cell of no real checkpoint."""
    given: dict[str, object] = {
        "source": "runs/base",
        "step": 100,
        "weights": "w",
        "task": "sst2",
        "data": "d",
        "measure": "finetune",
        "settings": {"lr": 1e-5},
        "seed": 0,
    }
    return Cell.model_validate(given | values)
