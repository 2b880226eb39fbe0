"""A run in Weights & Biases and in MLflow: the real clients, offline; what they were told is what the run did."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.errors import RecipeError
from launcher.observe.trackers.clients import PublishRequest
from launcher.observe.trackers.tracking import Publishing, orders, tracking
from launcher.runtime.recipe.load import load
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import operator_event
from launcher.runtime.run.metrics import figures
from tests.support.runs.listeners import (
    Values,
    mlflow_runs,
    mlflow_values,
    wandb_records,
    wandb_rows,
    wandb_values,
)
from tests.support.runs.small_runs import step_records
from tests.support.runs.untrained import Attempt

PATIENCE_S = 180.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's login
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return open_store(tmp_path / "run")


def mlflow_uri(store: Store) -> str:
    return f"file://{Path(store.uri).parent}/mlruns"


def both(store: Store, poll_s: float = 0.05) -> list[PublishRequest]:
    trackers = (
        "logging.wandb={project: p, mode: offline}",
        f"logging.mlflow={{uri: '{mlflow_uri(store)}'}}",
    )
    return orders(store, load("electra-small", trackers), poll_s)


def publish(store: Store) -> None:
    """One start of the command: everything that is there by its end."""
    notes: list[str] = []
    publishing = [Publishing(order, notes.append) for order in both(store)]
    for one in publishing:
        one.ask_to_end()
    for one in publishing:
        one.end(PATIENCE_S)
    assert notes == []


def committed_lineage(store: Store) -> Values:
    values = Values()
    for record in (*step_records(store), *read_history(store).evaluations):
        for name, value in figures(record).items():
            values.setdefault(name, {})[record["step"]] = value
    return values


def without_marks(values: Values) -> Values:
    return {name: by_step for name, by_step in values.items() if name != "times_gone_back"}


@pytest.mark.long
def test_one_run_across_restarts_and_a_rewind(store: Store, tmp_path: Path) -> None:
    """Three restarts and a rewind: what each tracker says last of a step is what the committed lineage says."""
    first = Attempt(store).train(8)
    good = first.commit()
    first.train(11).die()
    publish(store)
    assert max(wandb_values(tmp_path / "run")["train/lr"]) == 7, "a step that is not committed was published"

    second = Attempt(store).train(20)
    second.commit()
    publish(store)
    second.go_back(good)
    publish(store)  # as a start does that finds the rewind, and dies

    Attempt(store).train(16).commit()
    Attempt(store).train(24).commit()
    operator_event(store, "end", 9.0, step=24)
    publish(store)

    expected = committed_lineage(store)
    assert set(expected["train/lr"]) == set(range(24))
    assert without_marks(wandb_values(tmp_path / "run")) == expected
    assert without_marks(mlflow_values(mlflow_uri(store))) == expected
    rows = [row for row in wandb_rows(tmp_path / "run") if "train/lr" in row]
    assert [row["step"] for row in rows] == [*range(20), *range(8, 24)], (
        "each once, but for what the run repeated"
    )
    assert [row["times_gone_back"] for row in rows] == [0] * 20 + [1] * 16
    ensure_described(store, tmp_path)


def ensure_described(store: Store, tmp_path: Path) -> None:
    """The recipe, what happened, and that it is over."""
    described = [record.run for record in wandb_records(tmp_path / "run") if record.HasField("run")]
    assert len({run.run_id for run in described}) == 1
    assert set(described[-1].tags) == {"death", "end", "resume", "rewind", "start"}
    assert "rewind at step 20: the loss went bad" in described[-1].notes
    assert {"model.hidden", "run"} <= {item.key for item in described[0].config.update}
    (run,) = mlflow_runs(mlflow_uri(store))
    assert run.info.status == "FINISHED"
    assert run.data.params["model.hidden"] == "256"
    assert run.data.tags["events.death"] == "1"
    assert "death at step 11: a cosmic ray" in run.data.tags["mlflow.note.content"]


def stub(folder: Path, module: str, body: str) -> Mapping[str, str]:
    """A client that behaves like this, to be found before the real one."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(body)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ImportError('No module named wandb')", r"install maskfleet\[wandb\]"),
        ("import sys; sys.exit('enough')", "SystemExit: enough"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9"),
        ("print('chatter' * 100000)", "AttributeError"),
    ],
    ids=["is missing", "exits", "crashes", "is another module"],
)
def test_a_client_that_fails_is_one_line_to_the_operator(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    for name, value in stub(tmp_path / "stubs", "wandb", body).items():
        monkeypatch.setenv(name, value)
    told = threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        told.set()

    publishing = Publishing(both(store)[0], note, again_s=0.01)
    assert told.wait(PATIENCE_S)
    publishing.ask_to_end()
    publishing.end(PATIENCE_S)
    (text,) = notes
    assert text.startswith("wandb: not published: ")
    assert " run " in text
    assert re.search(reason, text), text


@pytest.mark.long
def test_a_client_that_hangs_is_ended_with_the_command(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    body = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(10**6)"
    for name, value in stub(tmp_path / "stubs", "wandb", body).items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    publishing = Publishing(both(store)[0], notes.append)
    process = await_pid(started)
    publishing.ask_to_end()
    publishing.end(0.2)
    assert " time" in notes[0]
    assert not process.is_running()


def await_pid(file: Path) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return psutil.Process(int(file.read_text()))


@pytest.mark.long
def test_without_a_login_the_operator_is_told(store: Store) -> None:
    notes: list[str] = []
    (order,) = orders(store, load("quickstart", ("logging.wandb={project: p}",)))
    publishing = Publishing(order, notes.append)
    publishing.end(PATIENCE_S)  # nobody has asked it to: it gives up
    (text,) = notes
    assert "WANDB_API_KEY" in text


def test_a_server_that_is_down_does_not_keep_the_command(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client would try for minutes."""
    notes: list[str] = []
    (order,) = orders(store, load("quickstart", ("logging.mlflow={uri: 'http://127.0.0.1:9'}",)), 0.05)
    publishing = Publishing(order, notes.append)
    publishing.ask_to_end()
    publishing.end(0.5)
    (note,) = notes
    assert re.match(r"mlflow: .*\btime\b", note)


DRIVER = """
import sys, threading
from launcher.observe.trackers.clients import PublishRequest
from launcher.observe.trackers.tracking import Publishing
publishing = Publishing(PublishRequest.model_validate_json(sys.stdin.readline()), print)
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.long
def test_what_a_killed_driver_leaves_is_published_and_then_the_process_ends(store: Store) -> None:
    Attempt(store).train(6).commit()
    order = both(store, poll_s=600.0)[1]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(order.model_dump_json() + "\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "ready\n"
    child = await_child(driver.pid, store)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    child.wait(PATIENCE_S)
    assert set(mlflow_values(mlflow_uri(store))["train/lr"]) == set(range(6))


def await_child(pid: int, store: Store) -> psutil.Process:
    """Once it knows what to do."""
    deadline = time.monotonic() + PATIENCE_S
    while store.size("trackers/mlflow.json") is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = psutil.Process(pid).children()
    return child


def test_nothing_is_started_unless_the_recipe_asks(store: Store) -> None:
    before = threading.active_count()
    with tracking(store, load("quickstart"), print):
        assert threading.active_count() == before
    assert list(store.list("trackers/")) == []


def test_a_recipe_names_trackers_and_never_a_secret() -> None:
    recipe = load(
        "quickstart", ("logging.mlflow={uri: 'https://ml.example.com'}", "logging.wandb={project: p}")
    )
    assert recipe.logging.wandb is not None
    assert recipe.logging.wandb.mode == "online"
    with pytest.raises(RecipeError, match="MLFLOW_TRACKING_USERNAME"):
        load("quickstart", ("logging.mlflow={uri: 'https://me:secret@ml.example.com'}",))
