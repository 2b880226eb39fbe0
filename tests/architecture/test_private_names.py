"""Private names of libraries stand in one module a library, which looks for them before it uses them."""

import ast
from pathlib import Path

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
_SOURCE = ast.parse((ROOT / "encoder_core/train/deepspeed_internals.py").read_text("utf-8"))
_TEXTS = [node.value for node in ast.walk(_SOURCE) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
# Names with an underscore that stand there as texts. `all_gather` means other things elsewhere.
DEEPSPEEDS = {text for text in _TEXTS if text.isidentifier() and "_" in text} - {"all_gather"}


def private(text: str) -> list[str]:
    """Names that begin with an underscore and are not a file's own, and what is known of DeepSpeed's."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name in DEEPSPEEDS or _hidden(name):
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
