"""The guide held against the product: its pages' blocks run in order, the keys it promises, the keys a recipe may have.

A ```console block holds commands, each after `$ `, and below a command what it prints. `...` stands for anything: on a
line of its own for any lines, at the end of one for its rest. Numbers, sizes and times may differ; words may not. What
follows "console" tells how a block is tested: `short: OPTIONS` are added to its commands unless the page is run as it
is written; `long` blocks run only then; `exit: 2` is the code that its commands end with. ```python blocks are run as
they are; a ```yaml block whose first line is the comment `# NAME.yaml` is written to that file.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pydantic
import pytest
import yaml
from pydantic.fields import FieldInfo
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from sybil.typing import Evaluator

from launcher.exit_codes import REPEAT
from launcher.runtime.recipe.schema import Recipe
from tests.support.checks.silence import without_signs_of_life

STARTS = 3
ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "infra/docs"
RECORDS = GUIDE / "records.md"
PROCESSES = ("train", "demo", "evaluate")  # of their own: they look after a tree of them
STAND_INS = (
    "sbatch",
    "squeue",
    "kubectl",
    "aws",
    "ray",
    "docker",
    "pip",
    "git",
    "infra/quickstart",
    "infra/test",
)
"""Commands of other programs: their words are checked, and they are not run."""

_INFO = re.compile(r"(?P<language>console|python|yaml)\b *(?P<how>[^\n]*)$\n", re.MULTILINE)
_HOW = re.compile(r"(?P<long>long)|short: *(?P<short>.*)|exit: *(?P<exit>\d+)|")
_ANY_LINES = r"(?:.*\n)*?"
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e-?\d+)?\s*(%|B|KiB|MiB|GiB|KB|MB|GB|k|M|G|T|P|s|min|h|ms)?(?!\w)")


@dataclass(frozen=True)
class Command:
    """One command of a block, and the lines that the page shows below it."""

    line: int
    text: str
    printed: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


def document_blocks(path: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block of a page."""
    lexer = RawFencedCodeBlockLexer(re.compile(r"(?P<language>\w*)[^\n]*$\n", re.MULTILINE))
    document = Document(path.read_text("utf-8"), str(path))
    return [(region.lexemes["language"], str(region.lexemes["source"])) for region in lexer(document)]


def commands(text: str) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    continued = False
    for number, shown in enumerate(text.splitlines(), 1):
        if shown.startswith("$ "):
            found.append(Command(number, shown[2:], ()))
        elif continued:
            found[-1] = Command(found[-1].line, f"{found[-1].text}\n{shown}", ())
        else:
            last = found[-1]
            found[-1] = Command(last.line, last.text, (*last.printed, shown))
        continued = found[-1].text.endswith("\\") and not found[-1].printed
    return found


def ensure_printed(said: str, shown: tuple[str, ...]) -> None:
    """What a page shows is what was printed, but for numbers, spaces and `...`."""
    if not shown:
        return
    lines = [_plain(line) for line in shown if line.strip()]
    pattern = "".join(_ANY_LINES if line == "..." else _line(line) for line in lines)
    heard = without_signs_of_life(said).splitlines()
    printed = "".join(f"{_plain(line)}\n" for line in heard if line.strip())
    expected = "\n".join(shown)
    assert re.fullmatch(pattern, printed), f"the page shows\n{expected}\nand this was printed\n{said}"


def _line(shown: str) -> str:
    return ".*".join(re.escape(part) for part in shown.split("...")) + "\n"


def _plain(line: str) -> str:
    kept = re.sub(r"[━─-]{2,}|[╸╺]", " ", line)
    return " ".join(_NUMBER.sub("#", kept).split())


@dataclass
class Page:
    """A page of the guide, to be run in `folder`. `as_written`: without what makes its commands short."""

    path: Path
    folder: Path
    as_written: bool = False
    ran: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Every block in its turn. Raises AssertionError with the page and line of what was not as the page says."""
        document = Document.parse(str(self.path), self._parse)
        document.namespace["__name__"] = "__main__"
        with contextlib.chdir(self.folder):
            for example in document.examples():
                example.evaluate()

    def _parse(self, document: Document) -> Iterator[Region]:
        for region in RawFencedCodeBlockLexer(_INFO)(document):
            how = _HOW.fullmatch(region.lexemes["how"])
            assert how is not None, f"{self.path.name}: a block is to be run in an unknown way: {region.lexemes['how']}"
            if how["long"] and not self.as_written:
                continue
            region.parsed = region.lexemes["source"]
            if region.lexemes["language"] == "python":
                region.evaluator = PythonEvaluator()
            elif region.lexemes["language"] == "yaml":
                region.evaluator = self._yaml
            else:
                region.evaluator = self._evaluator(how["short"] or "", int(how["exit"] or 0))
            yield region

    def _yaml(self, example: Example) -> None:
        """`# mine.yaml` on the first line names the file that the reader writes."""
        name, _, _ = str(example.parsed).partition("\n")
        yaml.safe_load(str(example.parsed))
        if re.fullmatch(r"# [\w./-]+\.yaml", name):
            Path(name[2:]).write_text(str(example.parsed), encoding="utf-8")

    def _evaluator(self, short: str, code: int) -> Evaluator:
        def evaluate(example: Example) -> str | None:
            for command in commands(str(example.parsed)):
                where = f"{self.path.name}:{example.line + command.line}: {command.text}"
                ended, said = self._execute(command, [] if self.as_written else shlex.split(short))
                assert ended == code, f"{where}\nended with {ended}\n{said}"
                try:
                    ensure_printed(said, command.printed)
                except AssertionError as error:
                    raise AssertionError(f"{where}\n{error}") from error
                self.ran.append(command.text)
            return None

        return evaluate

    def _execute(self, command: Command, more: list[str]) -> tuple[int, str]:
        words = command.words
        target = None
        if len(words) > 2 and words[-2] == ">":
            target, words = Path(words[-1]), words[:-2]
        if words[0] in STAND_INS:
            return 0, "\n".join(command.printed)
        if words[0] != "maskfleet":
            shell = ["bash", "-euo", "pipefail", "-c", command.text]
            done = subprocess.run(shell, capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        code, said = run_maskfleet([*words[1:], *more])
        if target is not None and code == 0:
            target.write_text(said, encoding="utf-8")
            said = ""
        return code, said


def run_maskfleet(arguments: list[str]) -> tuple[int, str]:
    """Exit code, and all that was printed. In this process where the command needs none of its own."""
    if arguments[0] in PROCESSES:
        return _as_a_scheduler_would(arguments)
    from tests.support.checks.command import exit_code

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "110")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = exit_code(*arguments)
    return code, printed.getvalue()


def _as_a_scheduler_would(arguments: list[str]) -> tuple[int, str]:
    """Code 75 says that the same command is to be run again: on a busy machine Ray may not come up in time."""
    program = str(Path(sys.executable).with_name("maskfleet"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    for _ in range(STARTS):
        done = subprocess.run(
            [program, *arguments],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != REPEAT:
            break
    return done.returncode, done.stdout


def promised(command: str) -> list[str]:
    """The keys in the command's line of the guide."""
    name = ", ".join(f"`{part}`" for part in command.split(", "))
    (line,) = [line for line in RECORDS.read_text().splitlines() if line.startswith(f"| {name} ")]
    return re.findall("`(.*?)`", line.split("|")[2].partition(";")[0])


def keys(found: list[dict[str, object]]) -> list[str]:
    """Of all records, which have the same."""
    assert found
    assert len({tuple(record) for record in found}) == 1
    return list(found[0])


def keys_of(kind: Any, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted paths of every field below an annotation; list items and names of one's own are `*`."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        for name, key in kind.model_fields.items():
            below = f"{path}.{name}" if path else name
            yield below, key
            yield from keys_of(key.annotation, below)
    elif origin in (tuple, list):
        yield from keys_of(inner[0], f"{path}.*")
    elif origin is dict:
        yield from keys_of(inner[1], f"{path}.*")
    elif origin is Annotated:
        yield from keys_of(inner[0], path)
    else:
        for one in inner:
            yield from keys_of(one, path)


TEACHER_MODEL = "objective.distil.teachers.*.model"


def schema() -> dict[str, list[FieldInfo]]:
    """Dotted path -> the fields that it may be, one for each family or packing that has it."""
    found: dict[str, list[FieldInfo]] = {}
    for path, key in keys_of(Recipe):
        if not path.startswith(f"{TEACHER_MODEL}."):  # the same as those of `model`
            found.setdefault(path, []).append(key)
    return found
