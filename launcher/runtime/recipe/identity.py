"""Divides the fields of a recipe into identity fields, which determine the trained model, and operational fields.

Operational fields may change at any restart. A changed identity field would make it another run, so the change is
refused with a diff; if the user forces it, it is recorded. The URI of a corpus is operational; its content is identity,
by its fingerprint (`launcher.runtime.run.record`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from launcher.runtime.recipe.schema import Recipe

FieldKind = Literal["identity", "operational"]

# The first pattern that matches a dotted path decides. A test covers every field of Recipe.
FIELD_KINDS: tuple[tuple[str, FieldKind], ...] = (
    ("name", "operational"),
    ("seed", "identity"),
    ("start", "identity"),
    ("corpus.sources.*.uri", "operational"),
    ("corpus.*", "identity"),
    ("tokenizer.*", "operational"),
    ("similar_words", "operational"),
    ("similar_words.*", "operational"),
    ("model.*", "identity"),
    ("input.*", "identity"),
    ("shuffle", "identity"),
    ("mixing.*", "identity"),
    ("objective.distil.teachers.*.uri", "operational"),
    ("objective.distil.teachers.*.step", "operational"),
    ("objective.*", "identity"),
    ("phases.*.microbatch", "operational"),
    ("phases.*.mixture.most_readings", "operational"),
    ("phases.*.corpora", "operational"),
    ("phases.*.corpora.*", "operational"),
    ("phases.*", "identity"),
    ("optimizer.*", "identity"),
    ("schedule.*", "identity"),
    ("average.*", "identity"),
    ("precision", "identity"),
    ("deterministic", "identity"),
    ("zero", "operational"),
    ("stage3_persistence", "operational"),
    ("reduce_dtype", "operational"),
    ("microbatch", "operational"),
    ("activation_checkpointing", "operational"),
    ("compile", "operational"),
    ("trainers", "operational"),
    ("trainers.*", "operational"),
    ("data_service.*", "operational"),
    ("checkpoint.*", "operational"),
    ("evaluation.*", "operational"),
    ("logging.*", "operational"),
    ("watchdog.*", "operational"),
    ("spikes.*", "operational"),
    ("weight_check.*", "operational"),
    ("stragglers.*", "operational"),
    ("recovery.*", "operational"),
    ("events.*", "operational"),
)

FlatFields = dict[str, object]  # leaf values of a recipe, by dotted path


def flatten(data: object) -> FlatFields:
    """Return the leaf values by dotted path. Items of lists have their index in the path."""
    return dict(_leaf_values(data, ""))


def identity_fields(recipe: Recipe) -> FlatFields:
    """Return the identity fields of `recipe` by dotted path."""
    fields = flatten(recipe.to_data())
    return {path: value for path, value in fields.items() if field_kind(path) == "identity"}


def fingerprint(fields: Mapping[str, object]) -> str:
    """Return the SHA-256 of `fields` (values by dotted path), which does not depend on their order."""
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()


def field_kind(path: str) -> FieldKind:
    """Return whether a dotted path is identity or operational. Raises KeyError if the table does not have the path."""
    parts = path.split(".")
    for pattern, kind in FIELD_KINDS:
        if _matches(parts, pattern.split(".")):
            return kind
    raise KeyError(path)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a pattern covers a path. A final `*` covers one or more parts, any other `*` exactly one part."""
    rest = pattern[-1] == "*" and len(parts) >= len(pattern)
    fits = all(wanted in ("*", part) for wanted, part in zip(pattern, parts, strict=False))
    return fits and (rest or len(parts) == len(pattern))


def changed_paths(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return the paths of the fields that differ or that only one of the two has, sorted."""
    absent = object()
    return [path for path in sorted(old.keys() | new.keys()) if old.get(path, absent) != new.get(path, absent)]


def diff_lines(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return a readable line for each changed field, sorted by path, such as `- model.layers: 12 -> 24`."""
    lines: list[str] = []
    for path in changed_paths(old, new):
        before, after = (_to_json(fields[path]) if path in fields else "(absent)" for fields in (old, new))
        lines.append(f"- {path}: {before} -> {after}")
    return lines


def _leaf_values(data: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaf_values(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and data:
        for index, value in enumerate(data):
            yield from _leaf_values(value, f"{path}.{index}")
    else:
        yield path, data


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
