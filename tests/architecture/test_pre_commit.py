"""The hooks of `pre-commit` find what `infra/test` finds, from .venv alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".pre-commit-config.yaml"
HOOKS = {hook["id"]: hook for repo in yaml.safe_load(CONFIG.read_text("utf-8"))["repos"] for hook in repo["hooks"]}
PRE_COMMIT = ROOT / ".venv/bin/pre-commit"

pytestmark = pytest.mark.skipif(not PRE_COMMIT.exists(), reason="infra/test has not installed .venv here")


def run_hooks(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pre-commit in a Git checkout, where nothing can be downloaded."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "PIP_NO_INDEX": "1"}
    return subprocess.run(
        [PRE_COMMIT, "run", "--color=never", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """An empty package with our configuration, all of it added to Git."""
    for name in (".pre-commit-config.yaml", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/__init__.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return tmp_path


def test_every_hook_runs_what_infra_test_installed() -> None:
    commands = [hook["entry"].split()[0] for hook in HOOKS.values()]
    assert all(command.startswith(".venv/bin/") and (ROOT / command).exists() for command in commands)
    script = (ROOT / "infra/test").read_text("utf-8")
    assert all(f'"$bin/{Path(command).name}"' in script for command in commands)


@pytest.mark.parametrize(
    ("hook", "written", "mended"),
    [
        (
            "ruff-check",
            "import sys\nimport os\n\nprint(os, sys)\n",
            "import os\nimport sys\n\nprint(os, sys)\n",
        ),
        ("ruff-format", "x = { 1:2 }\n", "x = {1: 2}\n"),
    ],
)
def test_style_is_mended_and_the_commit_refused(checkout: Path, hook: str, written: str, mended: str) -> None:
    file = checkout / "launcher/new.py"
    file.write_text(written)
    subprocess.run(["git", "add", "launcher"], cwd=checkout, check=True)
    assert run_hooks(checkout, hook).returncode == 1
    assert file.read_text() == mended
    subprocess.run(["git", "add", "launcher"], cwd=checkout, check=True)
    assert run_hooks(checkout, hook).returncode == 0
