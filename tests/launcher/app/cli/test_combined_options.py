"""Options of which one would have no effect beside the other are refused, and either alone is not."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import OptionError

COMBINATIONS = {
    "corpus build {text} --tokenizer {gone} --out {new} --workers 1": ("--heldout {share}", "--heldout-like {gone}"),
    "corpus show {gone}": ("--licences", "--removed"),
    "recipe show quickstart": ("--raw", "--set seed=3", "--tiny", "--timeline"),
    "fill {model} <mask>": ("--count 2", "--steps 2", "--temperature 0.5"),
    "doctor": ("--gpu", "--imports", "{new}"),
}
"""What goes on with any one of the options. The first does not go with any of the others."""


@pytest.mark.parametrize("command", COMBINATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_an_option_without_effect_is_refused(command: str, seed: int, tmp_path: Path) -> None:
    draw, (first, *others) = random.Random(seed), COMBINATIONS[command]
    (tmp_path / "text.txt").write_text("Some text.\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    places = {name: str(tmp_path / name) for name in ("new", "gone", "model")} | {"text": str(tmp_path / "text.txt")}
    places["share"] = draw.choice(["0", "0.0005", "0.1"])  # the first are the falsy one and the default
    given = [first, *draw.sample(others, draw.randint(1, len(others)))]
    draw.shuffle(given)

    def refusal(options: list[str]) -> BaseException | None:
        words = [word.format(**places) for word in f"{command} {' '.join(options)}".split()]
        return CliRunner().invoke(app, words).exception

    refused = refusal(given)
    assert isinstance(refused, OptionError)
    for option in given:
        name = option.split()[0].replace("{new}", "STORES")
        assert name in refused.problem
        assert name in refused.remedy
    if command != "doctor":  # which would measure this machine
        for option in given:
            assert not isinstance(refusal([option]), OptionError)


def test_fields_of_negatives_need_negatives(tmp_path: Path) -> None:
    words = f"corpus build {tmp_path} --tokenizer {tmp_path} --out {tmp_path}/new --texts pairs --negatives-field hard"
    refused = CliRunner().invoke(app, words.split()).exception
    assert isinstance(refused, OptionError)
    assert "--negatives-field" in refused.problem
    assert "--negatives " in refused.remedy
    zero = CliRunner().invoke(app, [*words.split(), "--negatives", "0"]).exception
    assert isinstance(zero, OptionError)
    assert not isinstance(CliRunner().invoke(app, [*words.split(), "--negatives", "2"]).exception, OptionError)
