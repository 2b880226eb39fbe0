"""The inputs of the bench of `corpus prepare` hold what they say; the bench itself, small."""

import json
from pathlib import Path
from typing import Any

import prepare
import prepare_inputs
import prepare_stages
import pytest

from data_service.prepare.configuration import Preparation
from data_service.prepare.prepare import prepare as run_preparation
from tests.support.data.raw_text import DOCUMENTS, ignore_progress

for package in ("warcio", "trafilatura", "mwparserfromhell", "datatrove"):
    pytest.importorskip(package, reason="needs maskfleet[prepare]")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    pages, packages = tmp_path / "doc", tmp_path / "site-packages/tool"
    pages.mkdir()
    packages.mkdir(parents=True)
    for number, text in enumerate(DOCUMENTS[:60]):
        paragraphs = "".join(f"<p>{part}</p>" for part in text[:3_000].split("\n\n"))
        body = f"<html><body><article><h2>Part {number}</h2>{paragraphs}</article></body></html>"
        (pages / f"{number}.html").write_text(body, "utf-8")
        (pages / f"{number}.txt").write_text(text[:900], "utf-8")
    (packages / "module.py").write_text(f'"""{"What it does. " * 30}"""\n', "utf-8")
    (packages.parent / "tool-1.dist-info").mkdir()
    (packages.parent / "tool-1.dist-info/METADATA").write_text("Name: tool\nLicense: MIT\n")
    lines = (json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(DOCUMENTS[60:90]))
    (tmp_path / "prose.jsonl").write_text("".join(lines))
    prepare_inputs.make_inputs(
        tmp_path / "inputs", [pages], [packages.parent], [tmp_path / "prose.jsonl"], most=10**9
    )
    return tmp_path / "inputs"


@pytest.mark.long
def test_as_many_documents_are_read_as_were_made(inputs: Path, tmp_path: Path) -> None:
    made: dict[str, Any] = json.loads((inputs / "made.json").read_text("utf-8"))
    asked = prepare.settings(inputs, [{"stage": "length", "least_words": 40}, {"stage": "exact_duplicates"}])
    run_preparation(Preparation.model_validate(asked), str(tmp_path / "out"), 1, ignore_progress)
    assert prepare.uncounted(tmp_path / "out", made) == []
    made["wiki"][1] += 1
    assert prepare.uncounted(tmp_path / "out", made) == ["wiki"]


@pytest.mark.long
def test_the_bench_small(inputs: Path, tmp_path: Path) -> None:
    found = prepare.bench_prepare(inputs, tmp_path / "work", kills=2, pause=5, seed=1, part=100_000)
    assert found.equal
    assert not found.uncounted
    assert found.ours[1] == found.peer[1]
    assert "datatrove" in prepare.render(found)


@pytest.mark.long
def test_stages_decide_alike_in_both_checkouts(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(DOCUMENTS[:40]))
    )
    found = prepare_stages.side(Path(__file__).parents[2], path, tmp_path)
    assert set(found.cpu_s) == {*prepare_stages.FILTERS, "near_duplicates", "all stages", "corpus prepare"}
    other = prepare_stages.Side(found.cpu_s, found.digests | {"c4_quality": "?"}, found.peak_mb)
    rows = prepare_stages.render(40, 10**6, [found], [other]).splitlines()
    assert [row.split("|")[1].strip() for row in rows if "NO" in row] == ["c4_quality"]
