"""A run with a name of any letters through its life: trained on Ray, reported, exported, read again."""

import random
from pathlib import Path

import pytest

from tests.support.checks.command import maskfleet
from tests.support.checks.figures import ensure_possible
from tests.support.data.names import ALPHABETS
from tests.support.runs import small_runs
from tests.support.runs.train_command import output, training
from tests.support.stores.s3 import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def name_of(seed: int) -> str:
    """Some letters of every alphabet, in any order; it may begin with a dash."""
    draws = random.Random(seed)
    letters = [letter for alphabet in ALPHABETS for letter in draws.choices(alphabet, k=4)]
    draws.shuffle(letters)
    return "".join(letters)


def ensure_whole_life(root: str, folder: Path, name: str) -> None:
    uri = small_runs.new_run(root, name, "logging.tensorboard=true")
    with training(uri) as process:
        assert process.wait(300) == 0
        said = output(process)
    figures = ensure_possible(said)
    assert len(figures) > 5
    assert "MFU" not in said  # a CPU's peak is not known
    assert len(small_runs.losses(uri)) == small_runs.STEPS
    page = folder / f"{name}.html"
    maskfleet("report", uri, "--out", str(page))
    assert page.stat().st_size > 1000
    assert maskfleet("runs", "status", uri, "--json")
    maskfleet("show", uri, "--step", "3")
    maskfleet("checkpoints", "export", uri, "--out", str(folder / name / "model"))
    assert (folder / name / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_on_a_disk(folder: Path, seed: int) -> None:
    ensure_whole_life(str(folder), folder, name_of(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 9))
def test_in_a_bucket(s3: S3Server, tmp_path: Path, seed: int) -> None:
    root = f"s3://{s3.new_bucket()}/{name_of(seed).replace('/', '')}"
    small_runs.prepare_corpus(tmp_path, root)
    ensure_whole_life(root, tmp_path, name_of(seed + 100))
