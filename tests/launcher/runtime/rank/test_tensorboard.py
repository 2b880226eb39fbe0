"""TensorBoard's files: readable by TensorBoard, and nobody's trouble whatever the disk does."""

import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.runtime.rank.tensorboard import TensorBoardFiles
from tests.support.faults.process import files_limited_to

WAIT_S = 30.0  # never as long
QUICK_S = 1.0


def record(step: int, loss: float = 2.0) -> dict[str, object]:
    figures = {
        "loss": loss,
        "mlm_accuracy": 0.25,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 100,
        "seconds": 0.5,
    }
    return {"kind": "step", "step": step, "data_wait_share": 0.0, **figures}


def read(folder: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboard_reads_them_and_repeated_steps_count_once(tmp_path: Path) -> None:
    first = TensorBoardFiles(tmp_path, 0)
    for step in range(6):
        first.step(record(step, 1.0))
    first.evaluation({"kind": "evaluation", "step": 5, "mlm_loss": 3.0, "perplexity": 20.0})
    assert first.close(WAIT_S)
    second = TensorBoardFiles(tmp_path, 4)
    second.step(record(4, 2.0))
    assert second.close(WAIT_S)
    assert read(tmp_path, "train/loss") == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}
    assert read(tmp_path, "train/tokens_per_second")[0] == 200.0
    assert read(tmp_path, "train/mlm_accuracy")[0] == 0.25


def test_evaluations_have_curves_of_their_own(tmp_path: Path) -> None:
    files = TensorBoardFiles(tmp_path, 0)
    files.evaluation({"kind": "evaluation", "step": 5, "mlm_loss": 3.0, "perplexity": 20.0})
    assert files.close(WAIT_S)
    assert read(tmp_path, "heldout/mlm_loss") == {5: 3.0}


def test_a_full_disk_is_told_once_and_leaves_a_gap(tmp_path: Path) -> None:
    notes: list[str] = []
    now = [0.0]
    files = TensorBoardFiles(tmp_path, 0, notes.append, clock=lambda: now[0])
    files.step(record(0))
    assert files._recorder.drain(WAIT_S)
    with files_limited_to(next(tmp_path.iterdir()).stat().st_size + 100):
        for step in range(1, 50):
            files.step(record(step))
        assert files._recorder.drain(WAIT_S)
    assert len(notes) == 1
    assert str(tmp_path) in notes[0]
    now[0] = 100.0
    files.step(record(50))
    assert files.close(WAIT_S)
    assert sorted(read(tmp_path, "train/loss")) == [0, 50]
    assert len(notes) == 1


def test_a_folder_that_cannot_be_is_no_reason_not_to_train(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file is in the way")
    notes: list[str] = []
    files = TensorBoardFiles(tmp_path / "tensorboard", 0, notes.append)
    files.step(record(0))
    assert files.close(WAIT_S)
    assert len(notes) == 1


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("launcher.runtime.rank.tensorboard._append", lambda file, events: release.wait())
    files = TensorBoardFiles(tmp_path, 0)
    begun = time.monotonic()
    for step in range(500):
        files.step(record(step))
    assert not files.close(0.05)
    assert time.monotonic() - begun < QUICK_S
    release.set()
