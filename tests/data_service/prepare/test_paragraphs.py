"""Paragraphs that return in many documents, held to a statement that looks at all texts at once."""

import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.ingest import pool
from data_service.ingest.tasks import run_task
from data_service.prepare import frequent_paragraphs
from data_service.prepare.paragraphs import DuplicateParagraphs
from data_service.prepare.statistics import Statistics
from tests.support.data.preparations import rows_of, run, write_texts
from tests.support.data.raw_text import files_of
from tests.support.faults.process import dies_at

LETTERS = "abcdefgh абвг 百日紅 éäß ff\uff11 .,-!\t"
RETURNING = "line of many pages"
CUT: dict[str, Any] = {"stage": "duplicate_paragraphs", "most_documents": 3, "least_characters": 4}


def cut(
    folder: Path, sources: Sequence[Sequence[str]], stages: Sequence[dict[str, Any]], workers: int = 1
) -> Statistics:
    inputs = [write_texts(folder.parent / f"{number}.jsonl", texts) for number, texts in enumerate(sources)]
    return run(inputs, stages, folder, workers=workers, chunk=1 << 13)


def plain(piece: str) -> str:
    """Letters and digits, folded character by character."""
    shown = " ".join(piece.split())
    found = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", shown).lower().casefold())
    return "".join(c for c in found if c.isalnum()) or shown


def pieces_of(text: str, unit: str) -> list[str]:
    """Lines or paragraphs, each with the line ends behind it."""
    lines = re.findall(r"[^\n]*\n|[^\n]+$", text)
    if unit == "line":
        return lines
    found: list[str] = []
    for line in lines:
        blank = not line.strip()
        if found and (blank or not re.search(r"\n[^\S\n]*\n\Z", found[-1])):
            found[-1] += line
        else:
            found.append(line)
    return found


def expected_texts(texts: Sequence[str], stage: DuplicateParagraphs) -> tuple[list[str], Counter[str]]:
    """The texts after the stage, and how many documents have each paragraph that is cut."""
    cut = [[(piece, plain(piece)) for piece in pieces_of(text, stage.unit)] for text in texts]
    seen: Counter[str] = Counter()
    for each in cut:
        seen.update({key for piece, key in each if piece.strip() and len(key) >= stage.least_characters})
    often = Counter({key: count for key, count in seen.items() if count > stage.most_documents})
    left = []
    for text, each in zip(texts, cut, strict=True):
        kept = [piece for piece, key in each if not (piece.strip() and key in often)]
        left.append(text if len(kept) == len(each) else "".join(kept).strip("\n"))
    return left, often


def made_up(drawn: random.Random, count: int, unit: str) -> list[str]:
    pool_of = ["".join(drawn.choices(LETTERS, k=drawn.randint(1, 25))) for _ in range(drawn.randint(4, 40))]
    between = ["\n"] if unit == "line" else ["\n\n", "\n \n", "\n", "\n\n\n"]

    def piece() -> str:
        if drawn.random() < 0.5:
            return "".join(drawn.choices(LETTERS, k=drawn.randint(0, 60)))
        found = drawn.choice(pool_of)
        return drawn.choice((found, found.upper(), f"  {found}", found.replace(".", " ")))

    def text() -> str:
        parts = [piece() + drawn.choice(between) for _ in range(drawn.randint(1, 9))]
        return "".join(parts) + drawn.choice(("", "\n", "end of it all"))

    return [found if (found := text()).strip() else "nothing" for _ in range(count)]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 80))])
def test_what_is_cut_is_what_more_documents_have(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    stage = DuplicateParagraphs(
        stage="duplicate_paragraphs",
        unit=drawn.choice(("line", "paragraph")),
        most_documents=drawn.choice((1, 2, 5, 20)),
        least_characters=drawn.choice((1, 3, 10)),
        least_words=drawn.choice((0, 1, 4)),
        listed=drawn.choice((0, 3, 1000)),
    )
    sources = [made_up(drawn, drawn.randint(1, 120), stage.unit) for _ in range(drawn.randint(1, 3))]
    statistics = cut(tmp_path / "out", [*sources, ["a document that stays " * 9]], [stage.model_dump()])
    texts = [text for source in sources for text in source]
    left, often = expected_texts(texts, stage)
    names = [f"{number}-{i}" for number, source in enumerate(sources) for i in range(len(source))]
    changed = [new != old for new, old in zip(left, texts, strict=True)]
    little = [
        cut and (not new.strip() or len(new.split()) < stage.least_words)
        for cut, new in zip(changed, left, strict=True)
    ]
    kept = {row["id"]: row["text"] for row in rows_of(tmp_path / "out/documents")}
    kept = {name: text for name, text in kept.items() if name in names}
    assert kept == {name: new for name, new, gone in zip(names, left, little, strict=True) if not gone}
    dropped = rows_of(tmp_path / "out/dropped")
    assert {row["id"] for row in dropped} == {name for name, gone in zip(names, little, strict=True) if gone}
    assert {(row["stage"], row["reason"]) for row in dropped} <= {("duplicate_paragraphs", "little_left")}
    (counts,) = [each for each in statistics.stages if each.stage == "duplicate_paragraphs"]
    assert counts.changed == sum(changed) - sum(little)
    assert counts.characters_cut == sum(len(old) - len(new) for old, new in zip(texts, left, strict=True))
    listed = rows_of(tmp_path / "out/paragraphs/1.parquet")
    assert [row["documents"] for row in listed] == sorted(often.values(), reverse=True)[: stage.listed]
    assert all(often[plain(row["paragraph"])] == row["documents"] for row in listed)


def boilerplate(seed: int, count: int = 60) -> list[list[str]]:
    drawn = random.Random(seed)
    own = [" ".join("".join(drawn.choices("abcdefgh", k=6)) for _ in range(8)) for _ in range(3 * count)]
    fixed = [f"The {number}th {RETURNING}" for number in range(12)]
    texts = ["\n".join([drawn.choice(fixed), *own[3 * i : 3 * i + 3], drawn.choice(fixed)]) for i in range(count)]
    return [[*texts[: count // 2], fixed[0], "\n".join(fixed)], texts[count // 2 :]]


STAGES = (
    {"stage": "exact_duplicates"},
    CUT,
    {"stage": "near_duplicates", "similarity": 0.95},
    {"stage": "near_duplicates", "keep": "all"},
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    cut(out, boilerplate(1), STAGES)
    return out


def same(out: Path, whole: Path) -> bool:
    ours, theirs = files_of(out), files_of(whole)
    counted = [json.loads(files.pop("statistics.json")) for files in (ours, theirs)]
    for statistics in counted:
        del statistics["preparation"]  # it names the inputs, which lie elsewhere
    return ours == theirs and counted[0] == counted[1]


@pytest.mark.long
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.integers(1, 200), min_size=1, max_size=2))
def test_killed_at_any_moment_and_continued_it_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, calls: list[int]
) -> None:
    out = tmp_path_factory.mktemp("killed") / "out"
    for call in calls:
        dies_at(call, lambda: cut(out, boilerplate(1), STAGES))
    cut(out, boilerplate(1), STAGES)
    assert same(out, whole)


@pytest.mark.long
@pytest.mark.parametrize("partition", [7, 400])
def test_neither_the_order_of_tasks_nor_the_size_of_partitions_changes_anything(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, partition: int
) -> None:
    drawn = random.Random(partition)

    def run_shuffled(_: object, function: Callable[..., Any], tasks: Sequence[Any]) -> Iterator[Any]:
        numbers = list(range(len(tasks)))
        drawn.shuffle(numbers)
        return ((number, run_task(function, tasks[number])) for number in numbers)

    monkeypatch.setattr(pool.WorkerPool, "run", run_shuffled)
    monkeypatch.setattr(frequent_paragraphs, "_PARTITION_RECORDS", partition)
    cut(tmp_path / "out", boilerplate(1), STAGES)
    assert same(tmp_path / "out", whole)


@pytest.mark.long
@pytest.mark.cluster
def test_workers_change_nothing(tmp_path: Path, whole: Path) -> None:
    cut(tmp_path / "out", boilerplate(1), STAGES, workers=2)
    assert same(tmp_path / "out", whole)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=" \n\t\rab", max_size=40), unit=st.sampled_from(["line", "paragraph"]))
def test_pieces_and_what_separates_them_are_the_text(text: str, unit: str) -> None:
    stage = DuplicateParagraphs.model_validate({"stage": "duplicate_paragraphs", "unit": unit})
    assert "".join(piece + separator for piece, separator in stage.split_pieces(text)) == text
