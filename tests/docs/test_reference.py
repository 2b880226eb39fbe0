"""What the guide lists is what the code has: a recipe's keys, kinds of events, exit codes, gauges, families."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import get_args

import pytest
import yaml

from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.figures import TERM_FIGURES, TERM_LOSS
from launcher.exit_codes import EXIT_CODES
from launcher.observe.inspect.report.events import ROUTINE_EVENT_KINDS
from launcher.runtime.cluster.display import GAUGE_DESCRIPTIONS
from launcher.runtime.recipe.identity import field_kind
from launcher.runtime.recipe.load import load
from launcher.runtime.run.metrics import HELD_OUT_METRICS, STEP_METRICS
from tests.support.checks.figures import UNSHOWN_FIELDS
from tests.support.checks.guide import GUIDE, ROOT, schema

PACKAGES = ("launcher", "checkpoints", "data_service", "encoder_core")


def tables(page: str, heading: str | None = None) -> Iterator[tuple[list[str], list[str]]]:
    """Every row of the tables below `heading` (to the next one of its level): its table's header, and its cells."""
    text = (GUIDE / page).read_text("utf-8")
    if heading is not None:
        level = heading.split(" ")[0]
        text = re.split(rf"^#{{1,{len(level)}}} ", text.split(f"{heading}\n", 1)[1], flags=re.MULTILINE)[0]
    header: list[str] = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| "):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if following.startswith("|---"):
                header = cells
            else:
                yield header, cells


def table_rows(page: str, heading: str | None = None) -> Iterator[list[str]]:
    return (cells for _, cells in tables(page, heading))


def documented() -> dict[str, tuple[str, str]]:
    """Key -> its default and the part of the page that it stands in."""
    found: dict[str, tuple[str, str]] = {}
    for heading, kind in (("## What the run is", "identity"), ("## How it is operated", "operational")):
        for keys, default, _ in table_rows("keys.md", heading):
            names = re.findall(r"`([\w.*]+)`", keys)
            defaults = default.split(", ") if default.count(", ") == len(names) - 1 else [default] * len(names)
            for name, value in zip(names, defaults, strict=True):
                assert name not in found, f"{name} is explained twice"
                found[name] = (value, kind)
    return found


def test_every_key_of_a_recipe_is_explained_and_none_is_invented() -> None:
    known = schema()
    leaves = {path for path in known if not any(other.startswith(f"{path}.") for other in known)}
    assert sorted(leaves - documented().keys()) == []
    assert sorted(documented().keys() - known.keys()) == []


def test_keys_stand_where_they_belong_and_their_defaults_are_true() -> None:
    known = schema()
    for path, (default, kind) in documented().items():
        assert field_kind(path) == kind, path
        fields = known[path]
        if len({repr(field.default) for field in fields}) > 1:
            assert default in ("the family", "the packing"), path
        elif fields[0].is_required():
            assert default == "required", path
        else:
            assert _spelt(fields[0].default) == default, path


def _spelt(value: object) -> str:
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case [*_]:
            return " and ".join(map(str, value)) or "none"
        case _:
            return str(value)


def test_the_page_begins_with_ten_keys_that_can_be_set_as_it_says() -> None:
    rows = list(table_rows("recipes.md", "## The ten keys that people change"))
    assert len(rows) == 10
    examples = tuple(how.strip("`").removeprefix("--set ") for _, _, how in rows)
    usual, changed = load("roberta-base").to_data(), load("roberta-base", examples).to_data()
    for (key, *_), example in zip(rows, examples, strict=True):
        path, (name, _, value) = key.strip("`"), example.partition("=")
        assert path in schema()
        assert re.fullmatch(re.escape(path).replace(r"\*", "0"), name), example
        assert value_at(usual, name) != value_at(changed, name) == yaml.safe_load(value), example


def test_recipes_deviate_as_the_page_says() -> None:
    """Each has our value; and theirs can be set."""
    rows = list(table_rows("recipes.md", "## Where recipes deviate"))
    assert {"xlnet-base", "xlnet-large", "albert-xxlarge", "macbert-base-zh"} <= set(
        re.findall(r"`([\w-]+)`", " ".join(row[0] for row in rows))
    )
    for names, key, here, theirs, _ in rows:
        path, ours, published = (cell.strip("`") for cell in (key, here, theirs))
        for name in re.findall(r"`([\w-]+)`", names):
            assert value_at(load(name).to_data(), path) == yaml.safe_load(ours), (name, path)
            changed = load(name, (f"{path}={published}",)).to_data()
            assert value_at(changed, path) == yaml.safe_load(published), (name, path)


def value_at(data: object, path: str) -> object:
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part] if isinstance(data, Mapping) else None
    return data


def event_kinds() -> dict[str, str]:
    """Kind -> where it is written: the first constant of calls that record an event, and of records made whole."""
    found: dict[str, str] = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for kind in _kinds(node):
                found[kind] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    return found


def _kinds(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(ast.Attribute(attr="event" | "rank_event") | ast.Name(id="record_operator_event"), args):
            for argument in args[:2]:
                yield from _constants(argument)
        case ast.Dict(keys=keys, values=values):
            named = {key.value: value for key, value in zip(keys, values, strict=True) if isinstance(key, ast.Constant)}
            if {"kind", "time", "attempt"} <= named.keys():
                yield from _constants(named["kind"])


def _constants(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(value)):
            yield value
        case ast.IfExp(body=body, orelse=orelse):
            yield from _constants(body)
            yield from _constants(orelse)


def test_every_kind_of_event_is_in_the_runbook_and_none_is_invented() -> None:
    written = event_kinds()
    assert len(written) > 25
    in_runbook = {
        kind for header, row in tables("runbook.md") if header[1] == "event" for kind in re.findall(r"`(\w+)`", row[1])
    }
    assert sorted(written.keys() - in_runbook) == []
    assert sorted(in_runbook - written.keys()) == []
    assert written.keys() >= ROUTINE_EVENT_KINDS


def test_every_kind_of_event_has_its_fields_in_the_records() -> None:
    kinds = {kind for row in table_rows("records.md", "## Events") for kind in re.findall(r"`(\w+)`", row[0])}
    assert kinds == event_kinds().keys()


def test_every_figure_of_a_record_is_explained_with_its_gauge() -> None:
    rows = [
        (re.findall(r"`([\w<>]+)`", names), re.findall(r"`(\w+)", gauges))
        for names, _, gauges in table_rows("records.md", "## Steps")
    ]
    by_term = {f"<term>{metric.suffix}" for metric in (TERM_LOSS, *TERM_FIGURES)}
    figures = {metric.name: metric for metric in (*STEP_METRICS, *HELD_OUT_METRICS)}
    explained = [name for names, _ in rows for name in names]
    assert sorted(explained) == sorted({"loss", *UNSHOWN_FIELDS, *by_term, *figures})
    for names, gauges in rows:
        for name in figures.keys() & set(names):
            assert gauges == ([figures[name].gauge or "figure"] if "gauge" in figures[name].on else []), name


def test_every_exit_code_is_in_the_runbook() -> None:
    codes = [int(row[0]) for row in table_rows("runbook.md", "## Exit codes")]
    assert codes == list(EXIT_CODES)


def test_every_gauge_is_explained() -> None:
    modules = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    named = (re.findall(r'\bmake_gauge\(\s*"(\w+)"', path.read_text("utf-8")) for path in modules)
    made = {*GAUGE_DESCRIPTIONS, *(name for names in named for name in names)}
    rows = [row[0] for row in table_rows("operating.md", "## Gauges")]
    assert len(made) > len(GAUGE_DESCRIPTIONS)
    assert {name for row in rows for name in re.findall(r"`(?:ray_maskfleet)?_(\w+)", row)} == made


@pytest.mark.long
def test_the_table_of_what_is_trained_together_is_what_the_tests_try() -> None:
    """`python -m tests.support.models.compositions` prints it."""
    from tests.support.models.compositions import table

    assert table() in (GUIDE / "keys.md").read_text("utf-8")


def test_every_family_is_in_the_table_of_what_goes_together() -> None:
    families = {one.model_fields["family"].default for one in get_args(get_args(ModelConfig)[0])}
    said = re.search(r"`model.family` is ([^\n]+)", (GUIDE / "keys.md").read_text("utf-8"))
    assert said is not None
    assert set(re.findall(r"`(\w+)`", said[1])) == families
