"""Reads a recipe's YAML so that messages name every mistake by file, line, path, value and remedy.

The text is first composed into nodes, which have line numbers and show duplicate keys. Then it is turned into plain
data, which pydantic validates in strict JSON mode: `layers: "12"` and `seed: true` are mistakes, not converted.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from data_service.errors import UserError
from launcher.errors import RecipeError
from launcher.runtime.recipe.yaml_bounds import EventLoader, bounded_events, find_refused_values

KeyPath = tuple[str | int, ...]  # keys and list indices that lead to a value
M = TypeVar("M", bound=BaseModel)

_MISSING = object()  # stands for a value that the data lack
_LIST_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # `010` is the name of a key, not an index
# PyYAML raises its own errors, and errors of the functions that convert dates, numbers and tags.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)


@dataclass(frozen=True)
class DocumentWording:
    """The wording of messages about one kind of document.

    Attributes:
        noun: name of the kind, such as "recipe".
        complete: command that shows a complete document.
        error: class of the errors that are raised.
    """

    noun: str
    complete: str
    error: type[UserError]


RECIPE_WORDING = DocumentWording("recipe", "maskfleet recipe show", RecipeError)


@dataclass(frozen=True)
class RecipeDocument:
    """Plain data, with the line in the text where each path was written.

    Attributes:
        data: mappings, lists and scalars.
        name: name of the file (or of the bundled recipe) in messages.
        lines: line number of each path, from 1.
        overridden: paths set by `--set`, which have no line.
        words: wording of messages about this kind of document.
    """

    data: dict[str, object]
    name: str
    lines: Mapping[KeyPath, int]
    overridden: frozenset[KeyPath] = field(default_factory=frozenset)
    words: DocumentWording = RECIPE_WORDING

    def location_text(self, path: KeyPath) -> str:
        """Return where a path is set, for messages: `file:line: a.b.c`, or `--set a.b.c` on the command line."""
        for cut in range(len(path), 0, -1):
            if path[:cut] in self.overridden:
                return f"--set {dotted_path(path)}"
            if path[:cut] in self.lines:
                return f"{self.name}:{self.lines[path[:cut]]}: {dotted_path(path)}"
        return f"{self.name}: {dotted_path(path)}" if path else self.name


def dotted_path(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def parse_document(
    text: str, name: str, words: DocumentWording = RECIPE_WORDING, *, is_bundled: bool = False
) -> RecipeDocument:
    """Return the document in `text`. Raises `words.error` for broken YAML, duplicate keys, or a top level that is not a
    mapping. `is_bundled`: whether the text comes with Maskfleet (`bounded_events`)."""
    lines: dict[KeyPath, int] = {}
    try:
        loader = EventLoader(bounded_events(text, is_bundled=is_bundled))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            # Lines are collected before the document is constructed, because merge keys change its nodes.
            _collect_line_numbers(node, (), lines, name, words)
        data = None if node is None else loader.construct_document(node)
    except _YAML_ERRORS as error:
        raise words.error(
            f"{name} is not valid YAML: {_yaml_error_text(error)}", remedy="fix the YAML there"
        ) from error
    if not isinstance(data, dict):
        raise words.error(
            f"{name} holds {type(data).__name__} at the top, not a mapping",
            remedy=f"start from a complete {words.noun}: {words.complete}",
        )
    return RecipeDocument(data, name, lines, words=words)


def with_sections(document: RecipeDocument, sections: Mapping[str, object]) -> RecipeDocument:
    """Return `document` with `sections` in place of its top-level keys of the same names. They have no line numbers."""
    lines = {path: line for path, line in document.lines.items() if path[0] not in sections}
    return replace(document, data={**document.data, **sections}, lines=lines)


def apply_assignments(document: RecipeDocument, assignments: Sequence[str]) -> RecipeDocument:
    """Return `document` with each assignment `a.b=value` applied; values are YAML (`null`, `{minutes: 5}`)."""
    data: dict[str, object] = json.loads(_encode(document))
    paths = set(document.overridden)
    for assignment in assignments:
        path, value = parse_assignment(assignment)
        _assign(data, path, value, assignment)
        paths.add(path)
    return replace(document, data=data, overridden=frozenset(paths))


def validate(model: type[M], document: RecipeDocument) -> M:
    """Return `document` as a `model`. Raises `document.words.error`, such as RecipeError, which names all mistakes."""
    for path, problem, remedy in find_refused_values(document.data):
        raise document.words.error(f"{document.location_text(path)}: {problem}", remedy=remedy)
    encoded = _encode(document)
    try:
        return model.model_validate_json(encoded, strict=True)
    except ValidationError as error:
        schema, document = model.model_json_schema(), replace(document, data=json.loads(encoded))
        problems, remedies = zip(
            *(_problem_and_remedy(detail, document, schema) for detail in error.errors()), strict=True
        )
    raise document.words.error("\n".join(_join_by_location(problems)), remedy="; ".join(dict.fromkeys(remedies)))


def _encode(document: RecipeDocument) -> str:
    """Return the document's data as JSON. Raises `document.words.error` if JSON cannot hold a value (`!!set`)."""
    try:
        return json.dumps(document.data)
    except TypeError as error:
        remedy = f"a {document.words.noun} holds mappings, lists, strings, numbers and booleans"
        raise document.words.error(f"{document.name}: {error}", remedy=remedy) from error


def _join_by_location(problems: Sequence[str]) -> list[str]:
    """Return one line for each location, with all problems of the location: a value that fits no variant of a union has
    a problem for each variant."""
    reasons: dict[str, list[str]] = {}
    for problem in problems:
        place, separator, reason = problem.rpartition(": ")
        reasons.setdefault(place + separator, []).append(reason)
    return [place + _join_reasons(list(dict.fromkeys(found))) for place, found in reasons.items()]


def _join_reasons(reasons: list[str]) -> str:
    """Return the reasons joined by "or", as alternatives; by commas if all of them are missing keys."""
    missing = all(reason.endswith(" is missing") for reason in reasons)
    return (", " if missing else ", or ").join(reasons)


def _yaml_error_text(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


def _collect_line_numbers(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str, words: DocumentWording
) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise words.error(
                    f"{name}:{line}: {dotted_path((*path, key))} is given twice", remedy="keep one of the two"
                )
            seen.add(key)
            lines[(*path, key)] = line
            _collect_line_numbers(value, (*path, key), lines, name, words)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _collect_line_numbers(item, (*path, index), lines, name, words)


def parse_assignment(text: str) -> tuple[KeyPath, object]:
    """Return path and value of an assignment `a.b=value`, whose value is YAML. Raises RecipeError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {text!r} is not an assignment", remedy="write --set a.b=value")
    path = tuple(int(part) if _LIST_INDEX.fullmatch(part) else part for part in key.strip().split("."))
    try:
        return path, EventLoader(bounded_events(value)).get_single_data()
    except _YAML_ERRORS as error:
        raise RecipeError(
            f"--set {text!r}: the value is not valid YAML: {_yaml_error_text(error)}",
            remedy="quote the value for the shell and for YAML",
        ) from error


def _assign(data: dict[str, object], path: KeyPath, value: object, assignment: str) -> None:
    node: object = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, dict):
            if not last and node.get(str(part)) is None:
                node[str(part)] = {}
            if last:
                node[str(part)] = value
            node = node[str(part)]
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            if last:
                node[part] = value
            node = node[part]
        else:
            raise RecipeError(
                f"--set {assignment!r}: {dotted_path(path[:depth]) or 'the recipe'} has no {part!r}",
                remedy="name an existing key or list index, or set the whole value that contains it",
            )


def _problem_and_remedy(detail: ErrorDetails, document: RecipeDocument, schema: dict[str, object]) -> tuple[str, str]:
    path = _data_path(detail["loc"], document.data, detail["type"])
    where = document.location_text(path)
    value = _value_at(document.data, path)
    if detail["type"] == "extra_forbidden":
        return _unknown_key_problem(where, path, document, schema)
    if detail["type"] == "missing":
        words = document.words
        return (
            f"{where} is missing",
            f"add {dotted_path(path)}; {words.complete} prints complete {words.noun}s",
        )
    shown = "" if isinstance(value, dict | list) or value is _MISSING else f" = {json.dumps(value)}"
    return (
        f"{where}{shown}: {reason_text(detail)}",
        f"correct {dotted_path(path) or f'the {document.words.noun}'}",
    )


def reason_text(detail: ErrorDetails) -> str:
    """Return pydantic's reason for an error, as the end of a sentence. The message of a check is kept as it is, because
    it may begin with a name; pydantic's own messages begin in lower case."""
    message = detail["msg"]
    if detail["type"] in ("value_error", "assertion_error"):
        return message.partition(", ")[2]
    return message if message[1:2].isupper() else f"{message[:1].lower()}{message[1:]}"  # JSON and URL are names, too


def _data_path(location: KeyPath, data: object, kind: str) -> KeyPath:
    """Return an error's path in the data. Pydantic's location also has the tags of unions, which the data lacks."""
    path: list[str | int] = []
    for depth, part in enumerate(location):
        child = _child_value(data, part)
        missing_key = kind == "missing" and depth == len(location) - 1
        if child is not _MISSING or missing_key:
            path.append(part)
            data = child
    return tuple(path)


def _value_at(data: object, path: KeyPath) -> object:
    for part in path:
        data = _child_value(data, part)
    return data


def _child_value(data: object, part: str | int) -> object:
    if isinstance(data, dict):
        return data.get(part, _MISSING)
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    return _MISSING


def _unknown_key_problem(
    where: str, path: KeyPath, document: RecipeDocument, schema: dict[str, object]
) -> tuple[str, str]:
    """Return problem and remedy of a key that does not exist at `path`: misspelt, or a key of another variant."""
    key, parent, noun = str(path[-1]), path[:-1], document.words.noun
    choice = _tagged_union_at(schema, parent, document.data)
    known = sorted(allowed_keys_at(schema, parent, document.data) - {key})
    with_it = f"with {choice.tag} {choice.value}" if choice else f"of {dotted_path(parent) or f'a {noun}'}"
    listed = f"keys {with_it}: {', '.join(known)}"
    if choice and (others := choice.tag_values_with_key(key, schema)):
        problem = f"{where} is not a key with {choice.tag} {choice.value}"
        return problem, f"remove it, or choose a {choice.tag} that has it: {', '.join(others)} ({listed})"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    remedy = f"did you mean {close[0]}? ({listed})" if close else f"remove it ({listed})"
    return f"{where} is not a key of a {noun}", remedy


@dataclass(frozen=True)
class _TaggedUnion:
    """A tagged union: a mapping in which the value of one key, the tag, decides which other keys are allowed.

    Attributes:
        tag: name of the tag key.
        value: value of the tag in the data.
        variants: JSON schema for each value of the tag.
    """

    tag: str
    value: str
    variants: Mapping[str, dict[str, object]]

    def tag_values_with_key(self, key: str, root: dict[str, object]) -> list[str]:
        """Return the values of the tag that allow `key`."""
        return [value for value, node in self.variants.items() if key in _property_names(_resolve_variants(node, root))]


def _tagged_union_at(schema: dict[str, object], path: KeyPath, data: object) -> _TaggedUnion | None:
    """Return the tagged union at `path`; None if there is none, or the data's tag has no known value."""
    for node in _schemas_at(schema, path):
        rule = _mapping_or_empty(node.get("discriminator"))
        tag, value = (
            str(rule.get("propertyName")),
            _child_value(_value_at(data, path), str(rule.get("propertyName"))),
        )
        variants = {name: {"$ref": ref} for name, ref in _mapping_or_empty(rule.get("mapping")).items()}
        if isinstance(value, str) and value in variants:
            return _TaggedUnion(tag, value, variants)
    return None


def allowed_keys_at(schema: dict[str, object], path: KeyPath, data: object) -> set[str]:
    """Return the property names that a JSON schema allows at `path`. In a union they are those of the variant that
    `data` chooses, else those of all variants."""
    choice = _tagged_union_at(schema, path, data)
    nodes = [choice.variants[choice.value]] if choice else _schemas_at(schema, path)
    return _property_names([variant for node in nodes for variant in _resolve_variants(node, schema)])


def _schemas_at(schema: dict[str, object], path: KeyPath) -> list[dict[str, object]]:
    """Return the JSON schemas of the values that are allowed at `path`. Unions are not resolved into their variants."""
    nodes = [schema]
    for part in path:
        variants = [variant for node in nodes for variant in _resolve_variants(node, schema)]
        nodes = [child for variant in variants for child in _child_schemas(variant, part)]
    return nodes


def _property_names(nodes: Sequence[dict[str, object]]) -> set[str]:
    return {key for node in nodes for key in _mapping_or_empty(node.get("properties"))}


def _mapping_or_empty(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _child_schemas(node: dict[str, object], part: str | int) -> list[dict[str, object]]:
    candidates = (
        _mapping_or_empty(node.get("properties")).get(str(part)),
        node.get("additionalProperties"),
        node.get("items"),
    )
    return [child for child in candidates if isinstance(child, dict)]


def _resolve_variants(node: dict[str, object], root: dict[str, object]) -> list[dict[str, object]]:
    """Return the variants of `node`, a part of the JSON schema `root`: references are followed, unions divided."""
    reference = node.get("$ref")
    if isinstance(reference, str):
        name = reference.rsplit("/", 1)[-1]
        return _resolve_variants(_mapping_or_empty(_mapping_or_empty(root.get("$defs")).get(name)), root)
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in _dicts_in(node.get(key))]
    return [variant for option in options for variant in _resolve_variants(option, root)] or [node]


def _dicts_in(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
