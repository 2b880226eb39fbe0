"""A run may have any name that a file system takes; what is printed to be copied means that run."""

import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.printable import shell_word
from data_service.service.gauges import make_gauge
from data_service.store.errors import BadUri
from data_service.store.open import open_store
from launcher.errors import RunError
from launcher.runtime.recipe.load import load
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import Run, open_run
from tests.support.data.names import SIGNS, names
from tests.support.runs.small_runs import SETTINGS, SMALL

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
FEW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def create(inputs: Path, uri: str) -> Run:
    places = (f"corpus.sources.text.uri={inputs}/corpus", f"tokenizer.uri={inputs}/tokenizer")
    return create_run(load(SMALL, (*places, *SETTINGS)), uri, NOW)


@FEW
@given(names)
def test_a_run_is_opened_by_any_name(inputs: Path, tmp_path: Path, name: str) -> None:
    uri = str(tmp_path / name / "run")
    try:
        run = create(inputs, uri)
        assert open_run(uri).record == run.record
        with pytest.raises(RunError) as refused:
            create(inputs, uri)
        assert uri in shlex.split(refused.value.remedy.partition(" continues")[0])
    finally:
        shutil.rmtree(tmp_path / name, ignore_errors=True)


@FEW
@given(names, st.sampled_from("\n\r\t\x00\x1b\x7f\u2028"), st.integers(0, 200))
def test_control_characters_are_refused_before_anything_is_written(
    inputs: Path, tmp_path: Path, name: str, control: str, place: int
) -> None:
    before = list(tmp_path.iterdir())
    with pytest.raises(RunError):
        create(inputs, f"{tmp_path}/{name[:place]}{control}{name[place:]}")
    assert list(tmp_path.iterdir()) == before


@given(names, st.characters(categories=["Cs"]))
def test_a_name_that_is_no_utf8_is_refused(name: str, surrogate: str) -> None:
    with pytest.raises(BadUri):
        open_store(f"runs/{name}{surrogate}")


@pytest.mark.parametrize("text", ["~nobody-of-this-name/run", "~ run", "~*[{"])
def test_a_home_folder_that_there_is_not_is_a_name(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store(text).uri == str(tmp_path / text)


@settings(max_examples=20)
@given(names | st.just(SIGNS) | names.map("-{}".format))
def test_a_copied_word_means_the_same_path(name: str) -> None:
    said = subprocess.run(["sh", "-c", f"printf %s {shell_word(name)}"], capture_output=True, check=True).stdout
    assert Path(said.decode()) == Path(name)
    assert not said.startswith(b"-")


@given(names)
def test_a_gauge_takes_any_name(name: str) -> None:
    make_gauge("named", "A test's.", {"run": name}).set(1.0)
