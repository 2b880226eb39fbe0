"""`tests/bench/compare.py`: each row differs in what it says, at its budget; a small row from text to page."""

import json
from pathlib import Path

import compare
import pytest
from program import BenchError
from sections import Document, read_documents, sections

from data_service.errors import UserError
from launcher.runtime.recipe.identity import changed, identity
from launcher.runtime.recipe.timeline import tokens_before
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run

FILE = compare.read_comparisons()
DIFFER = {
    "masks": {"objective"},
    "sentences": {"objective", "input"},
    "spans": {"objective"},
    "detection": {"objective", "model", "phases", "optimizer", "schedule"},
    "words": {"objective"},
    "rate": {"objective"},
    "causal": {"objective", "phases"},
    "annealed": {"objective", "phases"},
}
PLAIN = "This sentence has enough of plain words to be taken for a passage of prose by anyone"


@pytest.mark.parametrize("name", FILE.rows)
def test_a_row_takes_its_budget_and_differs_in_what_it_says(name: str) -> None:
    row = FILE.rows[name]
    found = []
    for one in row.recipes.values():
        budget = one.tokens or row.tokens or FILE.tokens
        found.append(compare.recipe_of(one, (*FILE.settings, *row.settings), budget, ()))
        assert tokens_before(found[-1], found[-1].total_steps) == pytest.approx(budget, rel=0.01)
    if name in DIFFER:
        differing = {
            path.split(".")[0] for other in found[1:] for path in changed(identity(found[0]), identity(other))
        }
        assert "objective" in differing
        assert differing <= DIFFER[name]


def found(loss: float) -> compare.Found:
    return compare.Found(tokens=100, changed=["objective.mlm.rate"], figures={"mlm_loss": loss})


def test_the_page_has_spreads_and_differences_seed_by_seed(tmp_path: Path) -> None:
    (tmp_path / "rate").mkdir()
    for label, losses in {"fifteen": (5.0, 5.5), "thirty": (4.5, 5.625)}.items():
        for seed, loss in enumerate(losses, 1):
            (tmp_path / "rate" / f"{label}-{seed}.json").write_text(found(loss).model_dump_json())
    page = compare.page(FILE, tmp_path)
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| thirty")]
    assert [line[-1] for line in cells] == ["5.062 (4.5 to 5.625) |", "-0.1875 (-0.5 to 0.125) |"]
    assert page.count("Not run.") == len(FILE.rows) - 1


@pytest.mark.long
@pytest.mark.cluster
def test_a_row_from_text_to_page_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, work = tmp_path / "text.txt", tmp_path / "work"
    text.write_text("".join(f"line {n} says what line {n * n % 97} said before it\n\n" for n in range(900)))
    arms = {"static": FILE.rows["masks"].recipes["static"], "dynamic": FILE.rows["masks"].recipes["dynamic"]}
    row = FILE.rows["masks"].model_copy(update={"recipes": arms})
    small = FILE.model_copy(
        update={"vocabulary": 120, "tokens": 4096, "heldout": 0.1, "seeds": 1, "rows": {"masks": row}}
    )
    monkeypatch.setattr(compare, "read_comparisons", lambda: small)
    compare.main(work, [str(text)])
    kept = {label: json.loads((work / f"masks/{label}-1.json").read_text()) for label in arms}
    own = read_history(open_run(str(work / "masks/dynamic-1")).store).evaluations[-1]
    assert kept["dynamic"]["figures"]["mlm_loss"] == own["mlm_loss"]
    first = kept["static"]["figures"]
    assert first["common mlm_loss"] == pytest.approx(first["mlm_loss"], rel=1e-4)
    assert kept["dynamic"]["changed"] == ["objective.mlm.copies"]
    monkeypatch.setattr(compare, "maskfleet", lambda *arguments: pytest.fail(f"repeated {arguments}"))
    compare.main(work, [str(text)])


def test_an_interrupted_command_interrupts_the_program_and_a_failed_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="train"):
        compare.maskfleet("train", str(tmp_path / "absent"))
    assert compare.maskfleet("--version").startswith("maskfleet")


def test_sections_of_restructuredtext_and_markdown() -> None:
    rst = (
        f"1. Motivation\n=============\n\n{PLAIN} with ``some_code(x)`` and a `link <https://example.org>`_ [1]_.\n\n"
        f".. note::\n\n   {PLAIN} inside of a directive.\n\n* {PLAIN} in a list.\n\nDesign\n------\n\n"
        f"{PLAIN} of :func:`len` by Ada Lovelace *herself* who uses it.\n"
    )
    motivation, design = sections(Document("one", rst))
    assert (motivation.title, design.title) == ("motivation", "design")
    assert motivation.paragraphs == (f"{PLAIN} with some_code(x) and a link.",)
    assert design.paragraphs == (f"{PLAIN} of len by Ada Lovelace herself who uses it.",)
    markdown = (
        f"# Top\n\n## Why\n\n{PLAIN} with `code` and [a link](x).\n\n```\n## No heading, {PLAIN}.\n```\n"
    )
    top, why = sections(Document("one", markdown))
    assert (top.paragraphs, why.paragraphs) == ((), (f"{PLAIN} with code and a link.",))


def test_documents_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "doc").mkdir()
    for name, data in {
        "guide.md": b"some text " * 50,
        "changelog.txt": b"some change " * 50,
        "latin.txt": b"\xe9t\xe9 " * 200,
        "program.py": b"print(1)\n" * 100,
    }.items():
        (tmp_path / "doc" / name).write_bytes(data)
    records = tmp_path / "own.jsonl"
    records.write_text('{"id": "a", "text": "other text"}\n{"text": "third"}\n')
    names = [document.name for document in read_documents([tmp_path / "doc", records])]
    assert names[0].endswith("guide.md")
    assert names[1:] == ["a", "own.jsonl:2"]
    records.write_text('{"id": "a"}\n')
    for path, named in ((records, r"own.jsonl, line 1"), (tmp_path / "absent", "absent: ")):
        with pytest.raises(UserError, match=named):
            list(read_documents([path]))
