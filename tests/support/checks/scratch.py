"""Copies of packages that a test changes as a newcomer would, and the counts of files that "Contributing" states."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "infra/docs/contributing.md"


@dataclass
class Scratch:
    """A copy of packages that a test may change. `touched`: files that it changed or created."""

    root: Path
    touched: set[str] = field(default_factory=set)

    def create(self, name: str, text: str) -> None:
        path = self.root / name
        assert not path.exists()
        path.write_text(text, "utf-8")
        self.touched.add(name)

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text("utf-8")
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new), "utf-8")
        self.touched.add(name)

    def run(self, program: str) -> str:
        """What a program prints that imports the packages of the copy."""
        path = f"{self.root}{os.pathsep}{ROOT}"  # also of processes that it starts; tests are not copied
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def copied(root: Path, *packages: str) -> Scratch:
    for package in packages:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return Scratch(root)


def counted(heading: str) -> int:
    """The number in "That is N files" of a section of the page."""
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (number,) = re.findall(r"That is (\d+) files of code", section)
    return int(number)
