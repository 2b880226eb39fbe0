"""The shape of the tree: the fixed top level, small files and functions, nothing of one machine in them."""

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    *PACKAGES,
    "findings",
    "infra",
    "tests",
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def python_files() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def test_top_level_is_the_fixed_one() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in found if not name.startswith(".")} == TOP_LEVEL


def test_init_files_are_empty() -> None:
    facade = ROOT / "launcher/maskfleet/__init__.py"  # what `import maskfleet` gives
    support = [ROOT / f"tests/{folder}__init__.py" for folder in ("", "support/")]  # a stranger's `tests` is not taken
    inits = [path for path in python_files() if path.name == "__init__.py" and path != facade]
    assert inits
    assert [str(path) for path in inits if path.stat().st_size] == []
    assert [path for path in inits if path.is_relative_to(ROOT / "tests")] == support


@pytest.mark.parametrize("package", [*PACKAGES, "infra"])
def test_every_package_has_a_design_note(package: str) -> None:
    assert (ROOT / package / "README.md").stat().st_size > 500


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path in python_files():
        text = path.read_text("utf-8")
        name = path.relative_to(ROOT)
        if text.count("\n") > LONGEST_FILE:
            too_long.append(f"{name}: {text.count(chr(10))} lines")
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    too_long.append(f"{name}: {node.name} has {length} lines")
    assert too_long == []


EVERYTHING, PICKLES = "catches everything", ("pickle", "torch's pickled files")
# The process that gives up everything else before it opens a pickle, and opens it with `weights_only`.
CONFINED = "checkpoints/hf/pickled_process.py"
# Where a process ends, or a thread that nobody waits for: there every failure is turned into a word and a code.
LAST_RESORTS = (
    "encoder_core/trials/compile_trial.py",  # a compiler and its machine may fail in any way: the run goes on in Python
    "data_service/ingest/ray_pool.py",  # Ray raises this very class where a busy machine takes too long
    "launcher/app/cli/main.py",  # only to add a hint to it: it is raised again
    "launcher/runtime/cluster/train.py",
    "launcher/after/diagnose/evaluators.py",
    "launcher/after/embed/model.py",  # transformers and tokenizers raise errors of any kind about files
    "launcher/after/evaluate/grid.py",  # what a cell dies of is its outcome
    "launcher/after/finetune/encode.py",
    "launcher/after/finetune/model.py",
    "launcher/after/onnx/graph.py",  # torch's exporter passes on whatever it meets in a model's code
    "launcher/after/onnx/parity.py",  # onnxruntime has no type of its own for what a graph cannot compute
    "launcher/runtime/run/log.py",
    "launcher/observe/sinks/publish.py",
    "launcher/observe/watch/live.py",
    "launcher/observe/watch/site.py",
)


def test_packages_have_no_unfinished_or_dangerous_code() -> None:
    found = []
    for path in (path for path in python_files() if path.relative_to(ROOT).parts[0] in PACKAGES):
        name = path.relative_to(ROOT)
        found += [
            f"{name}:{getattr(node, 'lineno', 0)}: {why}"
            for node in ast.walk(parsed(path))
            if (why := _why_not(node))
            and not (why == EVERYTHING and str(name) in LAST_RESORTS)
            and not (why in PICKLES and str(name) == CONFINED)
        ]
        if re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text("utf-8")):
            found.append(f"{name}: a note to self")
    assert found == []


def _why_not(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names) if any(alias.name.split(".")[0] in ("pickle", "dill") for alias in names):
            return "pickle"
        case ast.ImportFrom(module="pickle" | "dill" | "cloudpickle"):
            return "pickle"
        case ast.Call(func=ast.Name(id="eval" | "exec")):
            return "eval"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save")):
            return "torch's pickled files"
        case ast.ImportFrom(module="torch" | "torch.serialization", names=names) if any(
            alias.name in ("load", "save") for alias in names
        ):
            return "torch's pickled files"
        case ast.keyword(arg="weights_only", value=value) if ast.unparse(value) != "True":
            return "code from a pickle"
        case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
            return "code from a pickle"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen")):
            return "a shell"
        case ast.Call(keywords=keywords) if any(word.arg == "shell" for word in keywords):
            return "a shell"
        case ast.Name(id="NotImplementedError"):
            return "unfinished"
        case ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name(id="Exception")):
            return EVERYTHING
    return ""


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(x)",
        "from torch import load",
        "f(weights_only=False)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_each_way_to_open_a_pickle_is_seen(source: str) -> None:
    assert any(_why_not(node) for node in ast.walk(ast.parse(source)))


def test_nothing_names_this_machine_or_a_registry() -> None:
    """Absolute paths of a developer's machine, and hosts of package registries."""
    words = (
        "/".join(("", "work", "main")),
        "/".join(("", "root", "")),
        "pypi" + ".org",
        "pythonhosted" + ".org",
    )
    pattern = re.compile("|".join(re.escape(word) for word in words))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked()
        if path.suffix not in (".png", ".model")
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_readme_and_ci_run_the_same_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for command in ("infra/quickstart", "infra/test"):
        assert re.search(rf"^{command}\b", readme, re.MULTILINE), f"README.md does not show {command}"
        assert os.access(ROOT / command, os.X_OK)
    ci = [line for line in (ROOT / ".ci/run").read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert ci[-1] == "exec infra/test"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_fault_matrix_names_tests_that_exist() -> None:
    matrix = ROOT / "tests/faults/README.md"
    named = re.findall(r"`((?:\.\./)?[\w/]*test_\w+\.py)(?:::(\w+))?`", matrix.read_text())
    assert len(named) > 30
    for file, test in named:
        text = (matrix.parent / file).read_text()
        assert f"def {test}" in text if test else "def test_" in text, (file, test)
