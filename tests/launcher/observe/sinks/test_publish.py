"""A run in TensorBoard, Weights & Biases and MLflow: the real clients, offline; what they hold is what the run did."""

import os
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
from launcher.observe.sinks.process import SinkProcess, make_publish_request, publish_run
from launcher.observe.sinks.publish import publish_until_end as publishing_loop
from launcher.observe.sinks.sink import PublishRequest
from launcher.runtime.recipe.load import load
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import record_operator_event
from launcher.runtime.run.metrics import tracker_figures
from tests.support.runs.listeners import Values, mlflow_runs, mlflow_values, wandb_records, wandb_rows, wandb_values
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


def wanted(store: Store, *names: str, poll_s: float = 0.05) -> PublishRequest:
    settings = {
        "wandb": "logging.wandb={project: p, mode: offline}",
        "mlflow": f"logging.mlflow={{uri: '{mlflow_uri(store)}'}}",
    }
    board = f"logging.tensorboard={str('tensorboard' in names).lower()}"
    chosen = (board, *(settings[name] for name in names if name in settings))
    return make_publish_request(store, load("electra-small", chosen), poll_s)


def publish(store: Store) -> None:
    """One start of the command: everything that is there by its end, to all sinks."""
    notes: list[str] = []
    process = SinkProcess(wanted(store, "tensorboard", "wandb", "mlflow"), notes.append)
    process.request_end()
    process.end_process(PATIENCE_S)
    assert notes == []


def board_values(store: Store) -> Values:
    """What TensorBoard's own reader shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(Path(store.uri) / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {name: {event.step: event.value for event in board.Scalars(name)} for name in board.Tags()["scalars"]}


def board_steps(store: Store, name: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(Path(store.uri) / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return [event.step for event in board.Scalars(name)]


def committed_lineage(store: Store) -> Values:
    values = Values()
    for record in (*step_records(store), *read_history(store).evaluations):
        for name, value in tracker_figures(record).items():
            values.setdefault(name, {})[record["step"]] = value
    return values


def without_marks(values: Values) -> Values:
    return {name: by_step for name, by_step in values.items() if name != "times_gone_back"}


@pytest.mark.long
def test_one_run_across_restarts_and_a_rewind(store: Store, tmp_path: Path) -> None:
    """Three restarts and a rewind: what each sink says last of a step is what the committed lineage says."""
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
    record_operator_event(store, "end", 9.0, step=24)
    publish(store)

    expected = committed_lineage(store)
    assert set(expected["train/lr"]) == set(range(24))
    assert without_marks(wandb_values(tmp_path / "run")) == expected
    assert without_marks(mlflow_values(mlflow_uri(store))) == expected
    board = without_marks(board_values(store))
    assert board.keys() == expected.keys()
    assert board_steps(store, "train/lr") == list(range(24)), "each once: what was repeated is purged"
    for name, by_step in expected.items():
        assert board[name] == pytest.approx(by_step, rel=1e-6), name
    rows = [row for row in wandb_rows(tmp_path / "run") if "train/lr" in row]
    assert [row["step"] for row in rows] == [*range(20), *range(8, 24)], "each once, but for what the run repeated"
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
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


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
    noted = threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        noted.set()

    Attempt(store).train(4).commit()
    process = SinkProcess(wanted(store, "wandb", "mlflow"), note, restart_s=0.01)
    assert noted.wait(PATIENCE_S)
    process.request_end()
    process.end_process(PATIENCE_S)
    text = notes[0]
    assert re.match(r"wandb(, mlflow)?: not published: ", text)
    assert re.search(reason, text), text
    assert sum("wandb" in note for note in notes) == 1
    if "ended with code" not in text:  # another sink does not suffer, unless their process is killed
        assert set(mlflow_values(mlflow_uri(store))["train/lr"]) == set(range(4))


def test_a_client_that_hangs_is_ended_with_the_command_and_holds_up_no_other(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    body = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(10**6)"
    for name, value in stub(tmp_path / "stubs", "wandb", body).items():
        monkeypatch.setenv(name, value)
    Attempt(store).train(4).commit()
    notes: list[str] = []
    publisher = SinkProcess(wanted(store, "wandb", "tensorboard"), notes.append)
    process = await_pid(started)
    deadline = time.monotonic() + PATIENCE_S
    while store.size("trackers/tensorboard.state.json") is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    publisher.request_end()
    publisher.end_process(5.0)
    assert [note.partition(":")[0] for note in notes] == ["wandb"]
    assert "long" in notes[0]
    assert not process.is_running()
    assert set(board_values(store)["train/lr"]) == set(range(4))


def await_pid(file: Path) -> psutil.Process:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return psutil.Process(int(file.read_text()))


@pytest.mark.long
def test_without_a_login_the_operator_reads_why(store: Store) -> None:
    notes: list[str] = []
    settings = ("logging.wandb={project: p}", "logging.tensorboard=false")
    process = SinkProcess(make_publish_request(store, load("quickstart", settings)), notes.append)
    process.end_process(PATIENCE_S)  # nobody has asked it to: it gives up
    (text,) = notes
    assert "WANDB_API_KEY" in text


def test_a_server_that_is_down_does_not_keep_the_command(store: Store) -> None:
    """MLflow's client would try for minutes."""
    notes: list[str] = []
    settings = ("logging.mlflow={uri: 'http://127.0.0.1:9'}", "logging.tensorboard=false")
    process = SinkProcess(make_publish_request(store, load("quickstart", settings), 0.05), notes.append)
    process.request_end()
    process.end_process(0.5)
    (note,) = notes
    assert re.match(r"mlflow: .*\blong\b", note)


def test_a_disk_that_fails_for_a_while_costs_no_figure(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.observe.sinks.publish._REOPEN_DELAY_S", 0.05)
    Attempt(store).train(6).commit()
    obstacle = Path(store.uri) / "tensorboard"
    obstacle.write_text("")
    notes, ending, noted = list[str](), threading.Event(), threading.Event()

    def note(reason: str) -> None:
        notes.append(reason)
        noted.set()

    request = wanted(store, "tensorboard")
    thread = threading.Thread(target=publishing_loop, args=("tensorboard", request, ending, note))
    thread.start()
    assert noted.wait(PATIENCE_S)
    obstacle.unlink()
    while store.size("trackers/tensorboard.state.json") is None:
        time.sleep(0.01)
    ending.set()
    thread.join(PATIENCE_S)
    assert "tensorboard" in notes[0]
    assert set(board_values(store)["train/lr"]) == set(range(6))


DRIVER = """
import sys, threading
from launcher.observe.sinks.process import SinkProcess
from launcher.observe.sinks.sink import PublishRequest
process = SinkProcess(PublishRequest.model_validate_json(sys.stdin.readline()), print)
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.long
def test_what_a_killed_driver_leaves_is_published_and_then_the_process_ends(store: Store) -> None:
    Attempt(store).train(6).commit()
    request = wanted(store, "mlflow", poll_s=600.0)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(request.model_dump_json() + "\n")
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
    with publish_run(store, load("quickstart", ("logging.tensorboard=false",)), print):
        assert threading.active_count() == before
    assert list(store.list("trackers/")) == []


def test_a_recipe_names_trackers_and_never_a_secret() -> None:
    recipe = load("quickstart", ("logging.mlflow={uri: 'https://ml.example.com'}", "logging.wandb={project: p}"))
    assert recipe.logging.wandb is not None
    assert recipe.logging.wandb.mode == "online"
    with pytest.raises(RecipeError, match="MLFLOW_TRACKING_USERNAME"):
        load("quickstart", ("logging.mlflow={uri: 'https://me:secret@ml.example.com'}",))
