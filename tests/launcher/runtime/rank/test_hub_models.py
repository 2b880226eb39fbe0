"""`start: hf://...`: pinned to a commit at init and kept with the run, or refused at once. The Hub is on this machine:
folders served as repositories, each of one commit.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from typer.testing import CliRunner

from checkpoints.gather import SingleRank
from encoder_core.errors import ModelError
from launcher.app.cli.main import app
from launcher.errors import MissingPackage, RecipeError, RunError
from launcher.runtime.rank.build import build_model
from launcher.runtime.rank.initial_weights import initial_weights
from launcher.runtime.rank.kept_start import keep_start
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import open_run
from tests.support.models.published import pickle_weights
from tests.support.runs.starts import MLM, ROBERTA, Setting, export

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving_hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """The endpoint. `main`, `v1` and the commit are revisions of every repository."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
                if name not in repositories or revision not in ("main", "v1", COMMIT):
                    missing = "RepoNotFound" if name not in repositories else "RevisionNotFound"
                    return self._send(404, b"{}", {"X-Error-Code": missing})
                files = [path for path in repositories[name].rglob("*") if path.is_file()]
                siblings = [{"rfilename": str(path.relative_to(repositories[name]))} for path in files]
                about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
                return self._send(200, json.dumps(about).encode(), {})
            name, (_, commit, *rest) = "/".join(parts[:2]), parts[2:]
            path = repositories[name].joinpath(*rest)
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

        def _send(self, code: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def asked(setting: Setting, tmp_path: Path) -> Setting:
    """A run that wants a model of which the Hub has one, in `published`."""
    asked = setting.asks(ROBERTA, RecipeObjective(mlm=MLM), "hf://org/model")
    export(asked, tmp_path / "published")
    (tmp_path / "published/pytorch_model.bin").write_bytes(b"never fetched")
    return asked


@pytest.fixture
def hub(asked: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the Hub has as org/model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving_hub({"org/model": tmp_path / "published"}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield tmp_path / "published"


def starting(asked: Setting, start: str) -> Recipe:
    return asked.run.recipe.model_copy(update={"start": start})


@pytest.mark.long
@pytest.mark.parametrize("name", ["hf://org/model", "hf://org/model@v1", f"hf://org/model@{COMMIT}"])
def test_a_run_keeps_the_files_of_one_commit(asked: Setting, hub: Path, tmp_path: Path, name: str) -> None:
    uri = tmp_path / "new"
    recipe = keep_start(starting(asked, name), str(uri))
    copy = uri / "start" / "org" / f"model@{COMMIT}"
    assert recipe.start == str(copy)
    assert (copy / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    assert (copy / "tokenizer.json").exists()
    assert not (copy / "pytorch_model.bin").exists()
    (hub / "config.json").write_text("{}")  # the Hub's copy may change, or go
    run = create_run(recipe, str(uri), datetime.now(UTC))
    start = initial_weights(run, asked.tokenizer, build_model(run.recipe, asked.tokenizer), SingleRank())
    assert start is not None
    assert start.record["start"] == str(copy)


@pytest.mark.long
def test_pickled_weights_are_fetched_where_there_are_no_others(asked: Setting, hub: Path, tmp_path: Path) -> None:
    tensors = pickle_weights(hub)
    recipe = keep_start(asked.run.recipe, str(tmp_path / "new"))
    found = load_file(Path(recipe.start, "model.safetensors"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in found.items())


@pytest.mark.long
def test_init_pins_it(asked: Setting, hub: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(starting(asked, "hf://org/model").to_yaml())
    made = CliRunner().invoke(app, ["init", str(tmp_path / "mine.yaml"), str(tmp_path / "new")])
    assert made.exit_code == 0, made.output
    start = open_run(str(tmp_path / "new")).recipe.start
    assert start == str(tmp_path / "new/start/org" / f"model@{COMMIT}")


def test_another_start_is_left_alone(asked: Setting, tmp_path: Path) -> None:
    recipe = starting(asked, str(tmp_path / "published"))
    assert keep_start(recipe, str(tmp_path / "new")) is recipe
    assert not (tmp_path / "new").exists()


def test_a_model_that_does_not_fit_is_not_copied(asked: Setting, hub: Path, tmp_path: Path) -> None:
    recipe = asked.run.recipe.model_copy(update={"model": ROBERTA.model_copy(update={"layers": 3})})
    with pytest.raises(ModelError, match=r"\blayers\b.*\b3\b.*\b2\b"):
        keep_start(recipe, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_nothing_is_fetched_where_there_is_a_run(asked: Setting, hub: Path) -> None:
    with pytest.raises(RunError, match=r"\ba run\b"):
        keep_start(asked.run.recipe, asked.run.uri)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf://org/other", "hf://org/other cannot be fetched"),
        ("hf://org/model@v9", "hf://org/model@v9 cannot be fetched"),
        ("hf://", "does not name a model"),
        ("hf://org/model/main/config.json", "does not name a model"),
        ("hf://org/../model", "does not name a model"),
    ],
)
def test_what_is_not_there_is_refused(asked: Setting, hub: Path, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        keep_start(starting(asked, name), str(tmp_path / "new"))


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_remedy_comes_at_once(
    asked: Setting, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    began = time.monotonic()
    with pytest.raises(RecipeError, match=r"^start: .*\bfetched\b") as found:
        keep_start(asked.run.recipe, str(tmp_path / "new"))
    assert time.monotonic() - began < 10
    assert " start" in found.value.remedy


def test_without_the_package_it_is_named(asked: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match="huggingface_hub") as found:
        keep_start(asked.run.recipe, str(tmp_path / "new"))
    assert found.value.remedy == "pip install huggingface_hub"
