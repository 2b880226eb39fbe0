"""The streams that the driver opens ahead are those that ranks open."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_service.samples.spec import StreamSpec
from launcher.runtime.cluster.train import prefetch_streams
from launcher.runtime.run.record import open_run
from launcher.runtime.run.streams import heldout_spec, stream_spec
from tests.support.runs.small_runs import new_run


class RecordingFeed:
    """Stands in for the actor: remembers what it is asked to open."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.open = SimpleNamespace(remote=self.opened.append)


@pytest.fixture
def uri(inputs: Path, tmp_path: Path) -> str:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return new_run(tmp_path, "run")


def test_they_are_the_ranks_streams_in_their_order(uri: str) -> None:
    feed, run = RecordingFeed(), open_run(uri)
    prefetch_streams(open_run(uri), feed)
    tokenizer = run.tokenizer()
    expected = [*(stream_spec(run, tokenizer, phase) for phase in (0, 1)), heldout_spec(run, tokenizer)]
    assert feed.opened == [spec.model_dump_json() for spec in expected]
    assert [StreamSpec.model_validate_json(text) for text in feed.opened] == expected


def test_what_cannot_be_read_is_left_to_the_ranks(uri: str, tmp_path: Path) -> None:
    feed, run = RecordingFeed(), open_run(uri)
    for copy in {path.parent for path in tmp_path.rglob("tokenizer.json")}:
        shutil.rmtree(copy)
    prefetch_streams(run, feed)
    assert feed.opened == []
