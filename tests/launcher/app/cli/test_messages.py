"""What people are told when something is wrong: in our words, with what to do, and nothing is done in silence."""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner

from data_service.store.errors import AccessDenied, BadUri
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher import output
from launcher.app.cli.main import app
from launcher.errors import OutputError, RecipeError, RunError
from launcher.observe.inspect import baselines as counting
from launcher.observe.inspect.report.chart import Chart, ChartMark, Series, draw_chart
from launcher.runtime.preflight.doctor import probe_store
from launcher.runtime.preflight.measure import _checkpoint_bytes
from launcher.runtime.rank.initial_weights import check_start
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.summary import parameter_count
from launcher.runtime.run.record import open_run, select_checkpoint
from tests.support.checks.command import exit_code
from tests.support.checks.silence import without_signs_of_life
from tests.support.runs.untrained import Committing


def failing(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of `main`, which ends with code 2."""
    code, err = exit_code(*arguments), capsys.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("share", ["1.5", "-0.1", "1", "nan"])
def test_a_share_that_is_none_is_refused(share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Text.\n")
    build = ("corpus", "build", tmp_path / "a.txt", "--out", tmp_path / "c", "--tokenizer", tmp_path)
    err = failing(*build, "--heldout", share, capsys=capsys)
    assert f"--heldout {float(share)}: " in err
    assert not (tmp_path / "c").exists()


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="directory") as raised:
        output.write_file(tmp_path, "text")
    assert "folder" in raised.value.remedy
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        output.write_file(tmp_path / "file/below.html", "text")


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.touch()
    usual = page.stat().st_mode
    page.unlink()
    output.write_file(page, "before")
    assert page.stat().st_mode == usual

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left") as raised:
        output.write_file(page, "after")
    assert " space" in raised.value.remedy
    assert page.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_private_file_stays_private_while_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, copy, seen = tmp_path / "job.sh", shutil.copymode, list[int]()
    script.touch(mode=0o400)

    def look(source: Path, fresh: Path) -> None:
        seen.append(fresh.stat().st_mode & 0o777)
        copy(source, fresh)

    monkeypatch.setattr(shutil, "copymode", look)
    output.write_file(script, "secret")
    assert (seen, script.stat().st_mode & 0o777, script.read_text()) == ([0o600], 0o400, "secret")


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1))
def test_a_file_may_have_any_name_that_its_folder_takes(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Up to its 255 bytes, in any alphabet."""
    longest = (name * 255).encode()[:255].decode(errors="ignore")
    for known in {name, longest} - {".", ".."}:
        place = tmp_path_factory.mktemp("any") / known
        if len(known.encode()) <= 255:
            output.write_file(place, "text")
            output.write_file(place, "other")
            assert [(path.name, path.read_text()) for path in place.parent.iterdir()] == [(known, "other")]


def test_a_device_is_written_to() -> None:
    with pytest.raises(OutputError, match="No space left"):
        output.write_file(Path("/dev/full"), "text")
    output.write_file(Path("/dev/null"), "text")


def command(*arguments: str, stdout: int) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", "from launcher.app.cli.main import main; main()", *arguments]
    return subprocess.run(run, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.long
def test_a_full_standard_output_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = command("recipe", "show", "bert-tiny", stdout=full.fileno())
    assert done.returncode == 2
    said = without_signs_of_life(done.stderr)
    assert re.match(r"error: .*: No space left on device\nremedy: ", said)


@pytest.mark.long
def test_a_reader_that_has_ended_needs_no_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command("recipe", "show", "bert-tiny", stdout=writer)
    os.close(writer)
    assert (done.returncode, without_signs_of_life(done.stderr)) == (1, "")


@pytest.mark.long
def test_a_key_of_another_choice_is_named_as_such() -> None:
    with pytest.raises(RecipeError) as raised:
        load("bert-base", ("input.packing=full_sentences",))
    assert re.search(r"\binput\.short\b.*\bfull_sentences\b", raised.value.problem)
    assert "did you mean short" not in raised.value.remedy
    assert ": ordered_pair, segment_pair, two_segments" in raised.value.remedy
    with pytest.raises(RecipeError) as raised:
        load("bert-base", ("input.shrot=1",))
    assert re.search(r" short\?.*\bsegment_pair: ", raised.value.remedy)
    assert "lone_sentence" not in raised.value.remedy, "a key of another packing"


def test_names_that_are_nearly_right_are_guessed(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load("roberta-bse")
    assert " roberta-base? " in raised.value.remedy
    (tmp_path / "first").mkdir()
    for wrong, meant in (("scrach", "scratch"), (str(tmp_path / "frist"), str(tmp_path / "first"))):
        recipe = load("quickstart", (f"tokenizer.uri={inputs / 'tokenizer'}", f"start={wrong}"))
        with pytest.raises(RunError) as found:
            check_start(recipe)
        assert f" {meant}? " in found.value.remedy


def test_an_unreadable_name_of_a_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="read"):
        load("x" * 300)


def test_an_example_bucket_is_taken_for_one() -> None:
    with pytest.raises(BadUri, match="your-bucket"):
        open_store("s3://your-bucket/corpora/text")


def test_a_missing_bucket_is_named_by_the_doctor(s3: object) -> None:
    (finding,) = probe_store("s3://no-such-bucket/runs")
    assert finding.found.startswith("s3://no-such-bucket: ")
    assert "bucket" in finding.remedy


def test_a_checkpoint_that_is_passed_over_is_named(fresh_run: str, caplog: pytest.LogCaptureFixture) -> None:
    committing = Committing(fresh_run)
    committing.commit(3)
    (weights, *_) = Path(fresh_run, committing.commit(6).folder).glob("*.safetensors")
    weights.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert select_checkpoint(open_run(fresh_run), None).step == 3
    assert weights.name in caplog.text
    assert re.search(r"\bcheckpoint of step 3\b", caplog.text)


def test_half_an_interval_that_is_set_does_not_silently_keep_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load("roberta-base", ("checkpoint.every.steps=100",))
    assert re.search(r"\bcheckpoint\.every\b.*\b100 steps or 15 minutes\b", caplog.text)
    assert "--set 'checkpoint.every={steps: 100}'" in caplog.text
    caplog.clear()
    load("roberta-base", ("checkpoint.every={steps: 100}",))
    load("roberta-base", ("checkpoint.every.minutes=5",))
    assert caplog.text == ""
    said = CliRunner().invoke(app, ["recipe", "check", "roberta-base"]).output
    assert re.search(r"\bcheckpoint\b.*\b15 minutes\b", said)


def test_preflight_knows_the_vocabulary_of_the_run(inputs: Path) -> None:
    recipe = load("quickstart", (f"tokenizer.uri={inputs / 'tokenizer'}",))
    assert recipe.model.vocab is None
    assert _checkpoint_bytes(recipe) == 12 * parameter_count(recipe, 320) < 12 * parameter_count(recipe) / 2
    elsewhere = load("quickstart", ("tokenizer.uri=/nowhere",))
    assert _checkpoint_bytes(elsewhere) == 12 * parameter_count(elsewhere)


def test_a_forks_curves_begin_where_it_does() -> None:

    steps = np.arange(9000.0, 9100.0)
    series = (Series("loss", steps, steps),)
    page = draw_chart(
        Chart(
            "Loss",
            "nats",
            series,
            x_end=9100.0,
            marks=(ChartMark(9050.0, "stopped"), ChartMark(10.0, "long ago")),
            x_start=9000.0,
        )
    )
    places = [float(pair.split(",")[0]) for pair in page.split('class="line s1" points="')[1].split('"')[0].split()]
    assert (min(places), max(places) > 415) == (56.0, True)
    assert page.count('class="mark"') == 1
    assert ">9,000<" in page
    assert ">0<" not in page


def test_a_report_needs_no_right_to_write_into_the_run(
    fresh_run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: LocalStore, key: str, data: bytes) -> None:
        raise AccessDenied.for_uri(f"{store.uri}/{key}", "Read-only file system")

    run = open_run(fresh_run)
    monkeypatch.setattr(LocalStore, "put", refuse)
    assert counting.load_or_compute_baselines(run).targets > 0
    assert "baselines" in caplog.text


WIDE = "a cell of many words that no narrow screen has room for, and averyveryverylongwordattheendofit"


@pytest.mark.parametrize("columns", [None, "40"])
def test_no_cell_of_a_table_is_cut(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table("one", "two", "three", box=None)
    table.add_row(WIDE, WIDE, WIDE)
    output.print_table(table)
    said = capsys.readouterr().out
    assert "…" not in said
    letters = "".join(said.split())
    assert letters.count("w") == 3 * WIDE.count("w") + 1, "and the head's"
    assert columns is not None or said.count(WIDE) == 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("watch", "runs/x"), "runs watch"),
        (("fork", "a", "b"), "runs fork"),
        (("export", "a"), "checkpoints export"),
        (("train", "runs/x", "--learning-rate", "1"), "--set"),
        (("finetune", "m", "sst2", "--epochs", "1"), "--set"),
    ],
)
def test_what_is_elsewhere_is_named(arguments: tuple[str, ...], names: str) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert names in " ".join(result.output.replace("│", " ").split())
    assert "Did you mean" not in result.output
