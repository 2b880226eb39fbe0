"""Every command, given random values of its options and arguments, ends with our message or its result: never with a
traceback.
"""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.app.cli import main as cli
from tests.support.checks.command import command_tree

_VALUES = (
    *("", "-1", "0", "1.5", "-0.1", "nan", "inf", "1e400", "9" * 40, "true", "null", "a b", "ünï", "\x1b[2J"),
    *(
        ".",
        "/",
        "..",
        "nowhere/at/all",
        "folder",
        "text.txt",
        "broken.json",
        "s3://",
        "ftp://x/y",
        "file://x",
    ),
    *("=", "a.b", "seed=", "seed=-1", "phases=[", "model.layers=1e9", "x" * 300, "[", "{", "*", "~", "a\tb"),
)
_ELSEWHERE = {
    "demo",
    "doctor",
    "preflight",
    "train",
}  # what they start or measure has tests of its own


TREE = command_tree()
TRIED = sorted(one for one in TREE if one not in _ELSEWHERE and one != "runs watch")  # it serves


def words(command: str, draw: random.Random) -> list[str]:
    """A command line: what is required, and some of the rest."""
    found = command.split()
    for parameter in TREE[command].params:
        if not parameter.required and draw.random() < 0.7:
            continue
        usual = "5" if parameter.default is None else str(parameter.default)
        value = usual if draw.random() < 0.5 else draw.choice(_VALUES)
        option = parameter.opts[0]
        if not option.startswith("-"):
            found.append(draw.choice(_VALUES))
        else:
            found += [option] if parameter.is_flag else [option, value]
    # The one hands work to a scheduler, the other trains.
    return [word for word in found if word != "--submit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("anywhere")
    (made / "folder").mkdir()
    (made / "text.txt").write_text("Some text. And more of it.\n")
    (made / "broken.json").write_text("{")
    return made


@pytest.mark.long
@pytest.mark.timeout(300)
@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(command=st.sampled_from(TRIED), seed=st.integers(0, 2**32))
def test_random_options_end_in_a_message(
    command: str,
    seed: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = words(command, random.Random(seed))
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["maskfleet", *arguments])
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.1")
        before = os.umask(0o022)
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            os.umask(before)
    said = capfd.readouterr()
    assert ended.value.code in (0, 1, 2), arguments
    assert "Traceback" not in said.err + said.out, arguments
    assert ended.value.code != 2 or said.err, arguments
