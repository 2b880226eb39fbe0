"""Bundled recipes against the public configurations of their authors, key by key: equal, or marked beside the key.

The values are those of the files that are named, in our keys; where a repository has none for the released model, the
paper's table. A mark is a comment on the key's line, or above it, that says what theirs is. `-s` prints a table of
recipes, keys and deviations.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.runtime.recipe.identity import flatten
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.source import bundled
from tests.support.models.public_recipes import SOURCES
from tests.support.models.public_values import Public

WITHOUT = {
    *(
        "bart-base",
        "bart-large",
        "chinese-modernbert-base",
        "contrastive-base",
        "deberta-base-sop",
        "ernie-base-zh",
    ),
    *("macbert-base-zh", "quickstart", "roberta-wwm-ext-zh", "simcse-base", "spanbert-base", "xlnet-base"),
}

_MARKS = re.compile(
    r"\b(theirs?|authors'?|official|codes?|code's|papers?|published|released|command|rtd\.sh|mlm\.sh|configuration)\b"
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: ?%)?")


def deviations(public: Public, data: Any) -> Iterator[tuple[str, Any]]:
    """Each path where the recipe differs from the source, and the source's value."""
    for path, value in public.values.items():
        ours = value_at(data, path)
        if isinstance(value, float | int) and isinstance(ours, float | int) and not isinstance(value, bool):
            if not math.isclose(value, ours, rel_tol=1e-9):
                yield path, value
        elif ours != value:
            yield path, value


def value_at(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else (data or {}).get(part)
    return data


def comments_beside(text: str, path: str) -> str:
    """The comments on the line of a key, or the lines of a phase, and on the comment lines above."""
    lines = text.splitlines()
    head, *rest = path.split(".")
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{head}:"))
    last = next((i for i in range(first + 1, len(lines)) if re.match(r"\w", lines[i])), len(lines))
    at = range(first, last)
    if head == "phases":
        items = [i for i in at if lines[i].lstrip().startswith("- {")] + [last]
        at = range(items[int(rest[0])], items[int(rest[0]) + 1])
    else:
        at = range(*(lambda found: (found, found + 1))(_line_of(lines, at, rest)))
    above = at.start
    while lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return " ".join(line.partition("#")[2] for line in lines[above : at.stop] if "#" in line)


def _line_of(lines: list[str], at: range, keys: list[str]) -> int:
    """The line of the last key of a path, each below or on the line of the one before."""
    place = at.start
    for key in keys:
        place = next((i for i in range(place, at.stop) if re.search(rf"\b{key}:", lines[i].partition("#")[0])), place)
    return place


def is_marked(comment: str, value: Any) -> bool:
    """Whether a comment says that theirs is another one, and if it is a number, which."""
    if not _MARKS.search(comment):
        return False
    if isinstance(value, bool) or not isinstance(value, float | int):
        return True
    spelt = [one.replace(",", "") for one in _NUMBER.findall(comment)]
    numbers = [float(one.rstrip(" %")) / (100 if one.endswith("%") else 1) for one in spelt]
    return any(math.isclose(number, value) for number in numbers)


def test_every_recipe_has_a_source_or_none_is_public() -> None:
    covered = {name for public in SOURCES for name in public.recipes}
    assert covered | WITHOUT == set(bundled())
    assert not covered & WITHOUT


@pytest.mark.parametrize("name", sorted({name for public in SOURCES for name in public.recipes}))
def test_a_recipe_is_its_authors_or_marked_beside_the_key(name: str) -> None:
    """A path that is no key, by a typing error, would be a deviation for ever."""
    data, known, unmarked, count = load(name).to_data(), 0, [], 0
    keys = {path.rpartition(".")[0] for path in flatten(data)} | flatten(data).keys()
    for public in (one for one in SOURCES if name in one.recipes):
        known += len(public.values)
        values = {path: value for path, value in public.values.items() if value is not None}
        assert [path for path in values if path not in keys and value_at(data, path) is None] == []
        for path, value in deviations(public, data):
            count += 1
            comment = comments_beside(bundled()[name], path)
            if not is_marked(comment, value):
                unmarked.append(f"{path}: {value_at(data, path)}, theirs {value} ({comment})")
    print(f"| {name} | {known} | {count} |")
    assert not unmarked, "\n".join(unmarked)
