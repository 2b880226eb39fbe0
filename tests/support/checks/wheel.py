"""Maskfleet as a user installs it: the wheel of this checkout in an environment of its own, over our dependencies."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
_PACKAGES = ("launcher", "checkpoints", "data_service", "encoder_core")
_BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "infra", *_PACKAGES)


def build(folder: Path) -> Path:
    """The wheel, built in `folder` from a copy: building leaves files beside the sources."""
    source = folder / "source"
    source.mkdir()
    for name in _BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("maskfleet-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The programs' folder of a new environment in `folder` that has the wheel, and sees this one's other packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    bin, (packages,) = folder / "bin", (folder / "lib").glob("python3*/site-packages")
    dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    pip = [sys.executable, "-m", "pip", "--python", str(bin / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--ignore-installed", str(wheel)], check=True)
    return bin


def obstruct(folder: Path, names: Iterable[str] = _PACKAGES) -> Path:
    """Packages in `folder` that bear the names of ours and break whoever imports them."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('a stranger: {name}')\n")
    return folder


def run(
    *command: str | Path, cwd: Path, check: bool = True, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """A program of the environment, started in `cwd`, with nothing of ours in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result
