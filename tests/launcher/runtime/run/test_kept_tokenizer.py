"""A run is complete in itself: its tokenizer goes with it, whatever becomes of the place that it came from."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_service.errors import TokenizerError
from data_service.store.errors import StoreUnavailable
from data_service.store.local import LocalStore
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from launcher.after.export.export import export_run
from launcher.observe.inspect.show import find_sample
from launcher.runtime.run.fork import fork
from launcher.runtime.run.kept_tokenizer import TOKENIZERS_FOLDER
from launcher.runtime.run.record import Run, open_run
from tests.support.runs.small_runs import new_run, reconciled
from tests.support.runs.starts import Setting as Asked
from tests.support.runs.starts import trained

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def home(inputs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)


def a_trained_run(home: Path) -> Run:
    run = open_run(new_run(home, "run"))
    trained(Asked(run, run.tokenizer()), run.uri, run.recipe.model, run.recipe.objective)
    return open_run(run.uri)


def test_what_a_run_can_do_it_can_without_the_place_of_its_tokenizer(home: Path) -> None:
    run = a_trained_run(home)
    wanted = load_tokenizer(str(home / "tokenizer")).hash
    shutil.rmtree(home / "tokenizer")
    shutil.rmtree(home / "corpus/tokenizer")
    assert run.tokenizer().hash == wanted
    assert find_sample(run, 0, 0).tokenizer.hash == wanted
    export_run(run, None, str(home / "model"))
    assert load_tokenizer(str(home / "model")).hash == wanted
    assert reconciled(run, recipe=None, accept_changes=False, now=NOW).recipe == run.recipe
    forked = fork(run, str(home / "fork"), None, (), keep_position=False, now=NOW).run
    shutil.rmtree(home / "run")
    assert forked.tokenizer().hash == wanted


def test_a_lost_copy_is_found_elsewhere_and_kept_from_then_on(home: Path) -> None:
    run = open_run(new_run(home, "run"))
    wanted = run.tokenizer().hash
    shutil.rmtree(home / "run" / TOKENIZERS_FOLDER)
    assert run.tokenizer().hash == wanted  # where the recipe says
    shutil.rmtree(home / "tokenizer")
    assert run.tokenizer().hash == wanted  # the corpus' copy
    reconciled(run, recipe=None, accept_changes=False, now=NOW)
    shutil.rmtree(home / "corpus/tokenizer")
    assert run.tokenizer().hash == wanted


def test_another_one_in_its_place_is_not_taken_for_it(home: Path) -> None:
    run = open_run(new_run(home, "run"))
    shutil.rmtree(home / "run" / TOKENIZERS_FOLDER)
    shutil.rmtree(home / "corpus/tokenizer")
    other = train_tokenizer("byte_bpe", ["quite another text of words"] * 9, 270)
    save_tokenizer(other, str(home / "tokenizer"))
    with pytest.raises(TokenizerError, match=rf"\btokenizer\b.*\({other.hash[:12]}\)"):
        run.tokenizer()


def test_a_damaged_copy_is_passed_over_and_mended(home: Path) -> None:
    run = open_run(new_run(home, "run"))
    (definition,) = (home / "run" / TOKENIZERS_FOLDER).glob("*/tokenizer.json")
    whole = definition.read_bytes()
    definition.write_bytes(whole[:100])
    wanted = load_tokenizer(str(home / "tokenizer")).hash
    assert run.tokenizer().hash == wanted
    reconciled(run, recipe=None, accept_changes=False, now=NOW)
    assert definition.read_bytes() == whole


def test_a_store_that_is_away_is_no_missing_tokenizer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(new_run(home, "run"))

    def away(store: LocalStore, key: str) -> bytes:
        raise StoreUnavailable(f"{store.uri}/{key} does not answer", remedy="wait")

    monkeypatch.setattr(LocalStore, "get", away)
    with pytest.raises(StoreUnavailable, match=r"run/tokenizers/.*\banswer\b"):
        run.tokenizer()
