"""Private names of libraries stand in one module a library, which looks for them before it uses them."""

import ast
from pathlib import Path

from encoder_core.train import deepspeed_internals as internals

ROOT = Path(__file__).parents[2]
PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")
HOMES = {
    "encoder_core/train/deepspeed_internals.py",
    "encoder_core/layers/torch_internals.py",
    "data_service/service/ray_internals.py",
}
OURS_OR_PYTHONS = {"_exit", "_current_frames", "_replace", "_root", "_DummyThread"}
ALONE = {  # one name of its library, in one place
    ("launcher/after/finetune/trainer.py", "_n_gpu"),  # transformers
    (
        "encoder_core/objectives/modules/teacher.py",
        "_apply",
    ),  # overridden, as subclasses of torch's modules do
}
# Attributes of DeepSpeed's objects that look public. Those in `optimizer` and the like mean other things elsewhere.
COMMON = {"optimizer", "module", "all_gather", "world_size", "global_rank", "basic_optimizer", "ds_id"}
DEEPSPEEDS = {
    name
    for names in (
        *internals.OPTIMIZER_NAMES.values(),
        *internals.PARAMETER_NAMES.values(),
        internals.MAPPING_NAMES,
    )
    for name in names
} | {"buffered_allreduce_fallback", "__compatible_ops__", "dummy_decorator"}


def private(text: str) -> list[str]:
    """Names that begin with an underscore and are not a file's own, and what is known of DeepSpeed's."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name in DEEPSPEEDS - COMMON or _hidden(name):
                found.append(name)
            case ast.Import(names=names):
                found += [part for each in names for part in each.name.split(".") if _hidden(part)]
            case ast.ImportFrom(module=module, names=names):
                parts = [*(module or "").split("."), *(each.name for each in names)]
                found += [part for part in parts if _hidden(part)]
    return [name for name in found if name not in OURS_OR_PYTHONS]


def _hidden(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_private_names_are_in_their_modules_only() -> None:
    files = {str(p.relative_to(ROOT)): p for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    found = {(file, name) for file, path in files.items() for name in private(path.read_text("utf-8"))}
    assert {(file, name) for file, name in found if file not in HOMES} == ALONE
    assert set(files) >= HOMES
