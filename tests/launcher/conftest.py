"""A corpus, a tokenizer and a run that has never trained, shared by the launcher's tests.

Ray and the training engine are imported where a fixture needs them: pure tests are to do without.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from data_service.tokenizers.load import load_tokenizer
from launcher.runtime.run.record import open_run
from tests.support.runs.small_runs import new_run, prepare_corpus

if TYPE_CHECKING:
    from tests.support.clusters.control import Cluster
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
def setting(fresh_run: str) -> "Setting":
    """A new run and its tokenizer, to be asked for other models."""
    from tests.support.runs.starts import Setting

    run = open_run(fresh_run)
    return Setting(run, load_tokenizer(run.recipe.tokenizer.uri))


@pytest.fixture
def other_run(inputs: Path, tmp_path: Path) -> str:
    """The URI of a second run over the shared corpus, to start from."""
    return new_run(inputs, str(tmp_path / "other"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> "Cluster":
    """Nodes of our own in place of Ray's."""
    import ray

    from launcher.runtime.cluster import control_loop, nodes
    from tests.support.clusters.control import Cluster

    cluster = Cluster(a=2, b=1)
    monkeypatch.setattr(ray, "nodes", cluster.nodes)
    monkeypatch.setattr(nodes, "draining_nodes", lambda: frozenset(cluster.draining))
    monkeypatch.setattr(control_loop, "dead_process", lambda: None)
    return cluster
