"""Who may import whom: launcher -> checkpoints -> encoder_core and the store; data_service never torch."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from functools import cache
from pathlib import Path

import pytest

from encoder_core.families.config import EncoderConfig
from tests.support.data.raw_text import DOCUMENTS, tokenizer_folder
from tests.support.models.exports import SERVED

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_by(path: Path, *, top_level_only: bool = False) -> frozenset[str]:
    """Absolute names of the modules that a file's import statements name."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes: Iterator[ast.AST] = iter(tree.body) if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def importing(library: str) -> set[str]:
    """Our files that import a library anywhere in them, relative to the root."""
    return {
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if any(name == library or name.startswith(f"{library}.") for name in imported_by(path))
    }


def loaded_with(modules: list[str]) -> set[str]:
    """Everything in sys.modules of a fresh interpreter that has imported `modules`."""
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    command = [sys.executable, "-c", code, json.dumps(modules)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_families_are_named_in_their_own_room_alone() -> None:
    """Others ask a configuration's properties, so that a new family is its file and a line of the catalogue."""
    bases = {base for family in SERVED.values() for base in type(family.config).mro()} - {*EncoderConfig.mro()}
    named = re.compile(rf"\b({'|'.join(one.__name__ for one in bases if one.__name__.endswith('Config'))})\b")
    others = [path for path in sources(*PACKAGES) if path.parent != ROOT / "encoder_core/families"]
    assert [str(path) for path in others if named.search(path.read_text("utf-8"))] == []


def test_the_data_service_never_loads_torch() -> None:
    """webdataset would: shards are written without it."""
    loaded = loaded_with([module_name(path) for path in sources("data_service")])
    assert not loaded & {"torch", "deepspeed", "webdataset", "transformers", *PACKAGES} - {"data_service"}


def test_encoder_core_loads_none_of_the_others() -> None:
    """Nor Triton, which is on GPUs only, but for the kernels written in it."""
    modules = [module_name(path) for path in sources("encoder_core")]
    loaded = loaded_with([name for name in modules if not name.startswith("encoder_core.kernels.")])
    assert "triton.language" not in loaded
    assert not loaded & {"data_service", "checkpoints", "launcher", "ray", "boto3", "transformers"}


GROUND = (
    "data_service.store",
    "data_service.errors",
    "data_service.printable",
    "data_service.formats",
    "data_service.processes",
)
"""The store, and files that import nothing of the data service."""


def test_checkpoints_load_encoder_core_and_the_store_only() -> None:
    loaded = loaded_with([module_name(path) for path in sources("checkpoints")])
    assert not loaded & {"launcher", "ray", "deepspeed", "transformers"}
    ours = {name for name in loaded if name.startswith("data_service.")}
    assert {name for name in ours if not name.startswith(GROUND)} == set()


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("encoder_core", {"encoder_core"}),
        ("data_service", {"data_service"}),
        ("checkpoints", {"checkpoints", "encoder_core", "data_service"}),
    ],
)
def test_import_statements_follow_the_arrows(package: str, allowed: set[str]) -> None:
    """Imports inside functions count, too."""
    for path in sources(package):
        ours = {name.split(".")[0] for name in imported_by(path)} & set(PACKAGES)
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {sorted(ours - allowed)}"


@pytest.mark.parametrize(
    ("library", "place"),
    [
        ("deepspeed", "encoder_core/train/engine.py"),
        ("boto3", "data_service/store/s3.py"),
    ],
)
def test_a_library_is_imported_in_one_file(library: str, place: str) -> None:
    assert importing(library) == {place}


def test_ray_stays_where_processes_are_placed() -> None:
    packages = {path.split("/")[0] for path in importing("ray")}
    assert packages <= {"data_service", "launcher"}
    assert len(importing("ray")) <= 19, sorted(importing("ray"))


def test_transformers_is_for_tests_and_the_types_of_the_api() -> None:
    assert all(path.startswith("launcher/app/api/") for path in importing("transformers"))


def test_importing_maskfleet_waits_for_nothing() -> None:
    assert not loaded_with(["maskfleet"]) & {*PACKAGES, "torch", "ray", "numpy"}


def test_nothing_that_a_rank_needs_for_its_seat_reaches_torch() -> None:
    """CUDA is asked when torch or DeepSpeed is imported, and would show the one GPU that Ray gave the rank."""
    loaded = loaded_with(["launcher.runtime.cluster.rank_process", "ray._private.worker", "ray.util"])
    assert not loaded & {"torch", "deepspeed"}
    assert {name for name in loaded if name.startswith("launcher.")} == {
        "launcher.runtime",
        "launcher.runtime.cluster",
        "launcher.runtime.cluster.rank_process",
        "launcher.runtime.cluster.rank_placement",
        "launcher.errors",
    }


def test_what_the_driver_and_a_rank_tell_each_other_reaches_no_torch_and_no_recipe() -> None:
    """Orders may reach a rank's process before it has imported anything else."""
    names = (
        "cluster.orders",
        "cluster.nodes",
        "policies.watchdog",
        "policies.elastic",
        "policies.failures",
    )
    loaded = loaded_with([f"launcher.runtime.{name}" for name in names])
    assert not loaded & {"torch", "deepspeed", "launcher.runtime.recipe.schema"}


def test_what_ray_unpickles_as_a_ranks_actor_comes_from_the_seat_alone() -> None:
    """By what cloudpickle writes: the class, and the modules that it names."""
    code = (
        "import pickletools, ray.cloudpickle\n"
        "from launcher.runtime.cluster.rank_process import RankProcess\n"
        "from ray.actor import _modify_class\n"
        "words = pickletools.genops(ray.cloudpickle.dumps(_modify_class(RankProcess)))\n"
        "print(*{word for _, word, _ in words if isinstance(word, str)})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    named = {word for word in result.stdout.split() if word.split(".")[0] in (*PACKAGES, "torch", "deepspeed")}
    assert named <= {"launcher.runtime.cluster.rank_process", "launcher.runtime.cluster.rank_placement"}
    assert "launcher.runtime.cluster.rank_process" in named


HEAVY = {
    *(
        "torch",
        "ray",
        "deepspeed",
        "transformers",
        "webdataset",
        "boto3",
        "pandas",
        "pyarrow",
        "sentencepiece",
        "google",
    ),
    *("numpy", "pydantic", "tokenizers", "psutil", "yaml", "zstandard", "pynvml"),
}
"""Libraries that take a command tens of milliseconds or more."""
_RECIPE, _TEXT = {"numpy", "pydantic", "tokenizers", "yaml"}, {"zstandard"}
AT_WORK: dict[str, tuple[set[str], int]] = {
    "--help": (set(), 420),
    "recipe list": (_RECIPE, 670),
    "recipe show roberta-base": (_RECIPE, 670),
    "recipe check roberta-base": (_RECIPE | _TEXT, 690),
    "tokenizer check tokenizer text.txt": (_RECIPE | _TEXT, 620),
    "corpus build text.txt --tokenizer tokenizer --out corpus": (_RECIPE | _TEXT, 680),
    "doctor": (_RECIPE | {"psutil", "pynvml"}, 730),
}
"""Light commands: which of these libraries each has loaded at its end, and how many modules at most."""


@pytest.mark.parametrize("command", AT_WORK)
def test_a_light_command_loads_what_it_needs(command: str, tmp_path: Path) -> None:
    if command == "doctor" and find_library("cuda"):
        pytest.skip("here CUDA's driver is, and torch is asked for GPUs")
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("\n\n".join(DOCUMENTS[:40]), "utf-8")
    code = (
        "import atexit, json, sys\n"
        "from launcher.app.cli.main import main\n"  # whose process works; a build's is looked after by another
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "sys.argv[0] = 'maskfleet'\n"
        "main()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stderr.splitlines()[-1])
    needed, most = AT_WORK[command]
    assert HEAVY & set(loaded) == needed
    assert len(loaded) <= most


READING = (
    "launcher.observe.inspect.status",
    "launcher.observe.watch.site",
    "launcher.after.tasks.summary",
    "encoder_core.objectives",
    "launcher.runtime.recipe.schema",
    "launcher.runtime.run.record",
    "launcher.runtime.run.create",
    "launcher.runtime.rank.kept_start",
    "launcher.runtime.rank.kept_start",
    "launcher.observe.inspect.show",
    "launcher.observe.inspect.report.page",
)
"""What commands import that read a recipe or a run, or only look."""
DRIVING = ("launcher.app.cli.train", "launcher.app.companions", "launcher.runtime.cluster.train")
"""What the driver of a training imports."""


def test_reading_a_recipe_or_a_run_loads_no_torch() -> None:
    folders = ("encoder_core/families", "encoder_core/objectives")
    descriptions = [module_name(path) for path in sources(*folders) if path.parent.name != "modules"]
    assert not loaded_with([*READING, *descriptions]) & {"torch", "ray", "deepspeed", "transformers"}


def test_the_driver_of_a_training_loads_no_torch() -> None:
    assert not loaded_with(list(DRIVING)) & {"torch", "deepspeed", "transformers"}


def test_counting_a_recipes_parameters_loads_neither_deepspeed_nor_torchs_compiler() -> None:
    loaded = loaded_with(["launcher.runtime.recipe.summary"])
    assert not loaded & {"ray", "deepspeed", "torch._dynamo", "torch._inductor", "transformers"}
