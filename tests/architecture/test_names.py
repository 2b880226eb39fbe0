"""Whatever a file takes from one of our modules is there, also in files that the default suite never runs."""

import random
import subprocess
from pathlib import Path

import pytest

from tests.support.checks.names import Tree, Use

ROOT = Path(__file__).parents[2]
MODULE = "launcher/runtime/run/create.py"
TAKEN = "launcher.runtime.run.create.create_run"
FORMS = {
    "from launcher.runtime.run.create import create_run": TAKEN,
    "def f():\n    from launcher.runtime.run.create import create_run": TAKEN,
    "from launcher.runtime.run import create": "launcher.runtime.run.create",
    "from launcher.runtime.run import create as runs\ndef f():\n    return runs.create_run": TAKEN,
    "import launcher.runtime.run.create as runs\nlambda: runs.create_run()": TAKEN,
    "import launcher.runtime.run.create\nx = launcher.runtime.run.create.create_run": TAKEN,
    "from launcher.runtime.run import create\nclass A:\n    x: create.create_run": TAKEN,
    "from launcher.runtime.run import create\nsetattr(create, 'create_run', 1)": TAKEN,
    "patch('launcher.runtime.run.create.create_run')": TAKEN,
    "CODE = '''\nfrom launcher.runtime.run.create import create_run\n'''": TAKEN,
}
"""Programs, and what each takes."""
HARMLESS = (
    "from launcher.runtime.run import create\ndef f(create):\n    return create.elsewhere",
    "from launcher.runtime.run import create\ndef f():\n    create = []\n    return create.elsewhere",
    "from launcher.runtime.run import create\ntry:\n    pass\nexcept OSError as create:\n    create.elsewhere",
    "import json\njson.elsewhere",
    "from launcher.runtime.run.create import create_run\ncreate_run.elsewhere",
)
"""Programs in which a name of the module is another thing."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    listing = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [file for file in listing.stdout.split("\0") if file and (ROOT / file).exists()]
    return {file: (ROOT / file).read_text("utf-8") for file in files}


@pytest.fixture(scope="module")
def uses(sources: dict[str, str]) -> list[Use]:
    """All names that the repository's files take. Fails where one is not there."""
    tree = Tree(sources)
    assert [str(use) for use in tree.missing()] == []
    return tree.uses


def test_every_name_that_is_taken_from_a_module_of_ours_is_there(uses: list[Use]) -> None:
    assert len(uses) > 5000
    files = {use.file.rpartition("/")[0] for use in uses}
    assert {
        "tests/bench",
        "tests/bench/evidence",
        "tests/faults",
        "launcher/app/cli",
        "checkpoints/hf",
    } <= files


@pytest.mark.parametrize("program", FORMS)
def test_a_name_that_is_gone_is_told_however_it_is_taken(program: str) -> None:
    there, elsewhere = "def create_run(): ...", "def create_one(): ..."
    assert Tree({MODULE: there, "tests/one.py": program}).missing() == []
    text = elsewhere if FORMS[program].endswith("run") else None
    files = {"launcher/runtime/run/log.py": ""} | ({MODULE: text} if text else {})
    missing = {f"{use.module}.{use.name}" for use in Tree(files | {"tests/one.py": program}).missing()}
    assert FORMS[program] in missing


@pytest.mark.parametrize("program", HARMLESS)
def test_a_name_that_is_something_else_is_let_alone(program: str) -> None:
    assert Tree({MODULE: "def create_run(): ...", "tests/one.py": program}).missing() == []


def test_what_only_type_checkers_import_is_not_there() -> None:
    module = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from json import loads\n"
    (use,) = Tree({MODULE: module, "tests/one.py": "from launcher.runtime.run.create import loads"}).missing()
    assert (use.name, use.line) == ("loads", 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_name_that_is_renamed_where_it_is_made_is_missed_where_it_is_used(
    sources: dict[str, str], uses: list[Use], seed: int
) -> None:
    """Of the repository's own: a function or class that a file elsewhere takes gets another name."""
    draw = random.Random(seed)
    while True:
        use = draw.choice(uses)
        made = next((f for f in sources if f == use.module.replace(".", "/") + ".py"), None)
        if made is not None and f"\ndef {use.name}(" in sources[made]:
            break
    renamed = sources[made].replace(f"\ndef {use.name}(", f"\ndef {use.name}_elsewhere(")
    tree = Tree({made: renamed, use.file: sources[use.file]})
    assert use in tree.missing()
