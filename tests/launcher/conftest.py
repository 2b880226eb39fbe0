"""A corpus, a tokenizer and a run that has never trained, shared by the launcher's tests."""

from pathlib import Path

import pytest
import ray

from data_service.tokenizers.load import load_tokenizer
from launcher.cluster import nodes
from launcher.run.record import open_run
from tests.support.clusters.coordinators import Cluster
from tests.support.runs.small_runs import new_run, prepare_corpus
from tests.support.runs.starts import Setting


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `corpus` and `tokenizer`. Read only."""
    folder = tmp_path_factory.mktemp("inputs")
    prepare_corpus(folder)
    return folder


@pytest.fixture
def fresh_run(inputs: Path, tmp_path: Path) -> str:
    """The URI of a new run over the shared corpus."""
    return new_run(inputs, str(tmp_path / "run"))


@pytest.fixture
def setting(fresh_run: str) -> Setting:
    """A new run and its tokenizer, to be asked for other models."""
    run = open_run(fresh_run)
    return Setting(run, load_tokenizer(run.recipe.tokenizer.uri))


@pytest.fixture
def other_run(inputs: Path, tmp_path: Path) -> str:
    """The URI of a second run over the shared corpus, to start from."""
    return new_run(inputs, str(tmp_path / "other"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Nodes of our own in place of Ray's."""
    cluster = Cluster(a=2, b=1)
    monkeypatch.setattr(ray, "nodes", cluster.nodes)
    monkeypatch.setattr(nodes.state, "get_draining_nodes", lambda: cluster.draining)
    return cluster
