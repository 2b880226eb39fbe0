"""Tests assert an error's type, its place and its value. Wording is free: assertions that fix a sentence are counted.

A sentence is two words in a row that are neither a place nor a value, as "line 4" and "'mask_token'" are. What is left
are texts of other programs, commands to type, and what stand-ins say.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 80
UNITS = re.compile(
    r"(line|row|step|rank|phase|block|byte|source|attempt|epoch|field|column|node|lane|token|batch|time|text|target|record"
    r"|layer|document|negative|example)s?"
)
COMMAND = re.compile(r"\b(maskfleet|pip|ray|apptainer exec|module)( [a-z-]+)+")
WORD = re.compile(r"[A-Za-z]?[a-z]+('s|'t)?[,:;.?]?\)?$")
SHOWN = re.compile(
    r"problem|remedy|str\(|output|\b(out|err|log)\b|std(err|out)|message|said|told|note|shown|caplog|printed|reason|text|page"
    r"|warn|\.value|error|line|screen|failure|card|summary"
)


def is_sentence(pattern: str) -> bool:
    words = re.sub(r"\.\*|\\n|\n|\|", " # ", COMMAND.sub("#", re.sub(r"\\b|\^|\$$", "", pattern))).split()
    plain = [bool(WORD.match(word)) for word in words]
    for i, word in enumerate(words):
        after, before = i + 1 < len(words) and not plain[i + 1], i and words[i - 1].strip(",")[-1:].isdigit()
        if UNITS.fullmatch(word.strip(",:;.")) and (after or before):
            plain[i] = False
    return any(one and other for one, other in pairwise(plain))


def has_sentence(*nodes: ast.AST) -> bool:
    keys = {id(n.slice) for node in nodes for n in ast.walk(node) if isinstance(n, ast.Subscript)}
    texts = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant) and id(n) not in keys)
    return any(is_sentence(text.value) for text in texts if isinstance(text.value, str))


def sentences(tree: ast.AST) -> Iterator[int]:
    """Lines of assertions that fix one."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="raises" | "warns"), keywords=[ast.keyword(arg="match"), *_]):
                if has_sentence(node.keywords[0].value):
                    yield node.lineno
            case ast.Assert():
                yield from (node.lineno for part in ast.walk(node.test) if fixes_one(part))


def fixes_one(part: ast.AST) -> bool:
    match part:
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[shown]):
            return has_sentence(part.left) and bool(SHOWN.search(ast.unparse(shown)))
        case ast.Compare(ops=[ast.Eq()], comparators=[other]):
            sides = ((part.left, other), (other, part.left))
            return any(has_sentence(one) and SHOWN.search(ast.unparse(shown)) for one, shown in sides)
        case ast.Call(func=ast.Attribute(attr="startswith" | "endswith")):
            return has_sentence(*part.args)
    return False


def test_few_assertions_fix_the_wording_of_a_sentence() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for line in sorted(set(sentences(ast.parse(file.read_text("utf-8")))))
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_places_and_values_are_no_sentence() -> None:
    assert not any(
        map(is_sentence, ("a.csv, line 4", r"mask_token\b.*'<nope>'", "7 rows of s1", "missing bert.pooler"))
    )
    assert all(map(is_sentence, ("no such file", "'x' is damaged already", r"s1 .* no text in it")))
