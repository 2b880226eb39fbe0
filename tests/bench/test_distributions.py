"""The wheel and the source distribution hold the same, and each runs the quickstart where there is no checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import wheels

ROOT = wheels.ROOT


def build(source: Path, out: Path, kind: str) -> Path:
    """The distribution of `kind`, `wheel` or `sdist`, made of the sources in a folder, with what is installed here."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "clone").mkdir()
    wheels.copy_sources(folder / "clone")
    return {kind: build(folder / "clone", folder / kind, kind) for kind in ("sdist", "wheel")}


def members(wheel: Path) -> dict[str, bytes]:
    """Its files, but for the list of them, whose order is free."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.mark.long
def test_a_wheel_made_of_the_source_distribution_is_the_same(distributions: dict[str, Path], tmp_path: Path) -> None:
    subprocess.run(["tar", "xzf", distributions["sdist"], "-C", tmp_path], check=True)
    (unpacked,) = tmp_path.iterdir()
    assert members(build(unpacked, tmp_path / "out", "wheel")) == members(distributions["wheel"])
    lock = (unpacked / "infra/constraints.txt").read_bytes()
    assert lock == (ROOT / "infra/constraints.txt").read_bytes()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_quickstart_runs_outside_the_repository(kind: str, distributions: dict[str, Path], tmp_path: Path) -> None:
    """What `infra/quickstart` runs, in a new environment that has nothing but the distribution and what it requires."""
    venv.create(tmp_path / "env", with_pip=True)
    programs, away = tmp_path / "env/bin", tmp_path / "away"
    away.mkdir()
    install = [programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "infra/constraints.txt"]
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    for command in ([*install, distributions[kind]], [programs / "maskfleet", "demo", "--out", "demo"]):
        done = subprocess.run(
            [str(word) for word in command],
            cwd=away,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert list((away / "demo").rglob("model.safetensors"))
