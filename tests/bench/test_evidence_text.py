"""What the evidence page's tasks are made of: sections, prose without markup, and who sees which document."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from evidence.documents import Document, read_documents, without_repeats
from evidence.domain_tasks import author_names, find_proposals, write_tasks
from evidence.sections import sections
from evidence.settings import Domain
from hypothesis import given
from hypothesis import strategies as st

from launcher.after.tasks.task import load_task
from launcher.errors import OptionError

DOMAIN = Domain(
    dev=0.2,
    test=0.3,
    train_examples=30,
    dev_examples=10,
    test_examples=10,
    sections={"why": ("motivation", "rationale"), "what": ("design",), "open": ("open issues",)},
)
PLAIN = "This sentence has enough of plain words to be taken for a passage of prose by anyone"
RST = f"""PEP: 1
Title: A thing
Author: Ada Lovelace <ada@example.org>,
        Charles Babbage
Status: Draft

1. Motivation
=============

{PLAIN} with ``some_code(x)`` and a `link <https://example.org>`_ [1]_.

.. note::

   {PLAIN} inside of a directive.

* {PLAIN} in a list.

Design
------

{PLAIN} of :func:`len` by Ada Lovelace *herself* who uses it.
"""
MARKDOWN = f"""# Top

## Motivation

{PLAIN} with `code` and [a link](https://example.org).

```
## No heading, and {PLAIN} in code.
```
"""
words = st.lists(st.text("abcdefghij", min_size=2, max_size=9), min_size=14, max_size=30)


def test_sections_of_restructuredtext() -> None:
    motivation, design = sections(Document("one", RST))
    assert (motivation.title, design.title) == ("motivation", "design")
    (paragraph,) = motivation.paragraphs
    assert paragraph.text == f"{PLAIN} with some_code(x) and a link."
    assert [word for word, code in paragraph.words if code] == ["some_code", "(", "x", ")"]
    assert design.paragraphs[0].text == f"{PLAIN} of len by Ada Lovelace herself who uses it."


def test_sections_of_markdown() -> None:
    top, motivation = sections(Document("one", MARKDOWN))
    assert top.paragraphs == ()
    assert [paragraph.text for paragraph in motivation.paragraphs] == [f"{PLAIN} with code and a link."]


@pytest.mark.long
@given(st.lists(words, min_size=1, max_size=6), st.sampled_from(["# {}", "### {}", "{}\n======"]))
def test_plain_text_comes_through_as_it_is(paragraphs: list[list[str]], heading: str) -> None:
    text = "\n\n".join([heading.format("Heading"), *(" ".join(one) for one in paragraphs)])
    (section,) = sections(Document("one", text))
    assert [paragraph.text for paragraph in section.paragraphs] == [" ".join(one) for one in paragraphs]
    assert not any(code for paragraph in section.paragraphs for _, code in paragraph.words)


def test_names_of_authors() -> None:
    assert author_names([Document("one", RST)]) == {"Ada Lovelace", "Charles Babbage"}


def proposal(number: int) -> Document:
    """Sections whose passages say whose they are."""
    parts = [
        f"## {title}\n\n{PLAIN} about number{number} in {title} with `code{number}` at its end.\n\n"
        f"{PLAIN} which follows in number{number} of {title} by and by."
        for title in ("Motivation", "Design", "Open issues")
    ]
    return Document(f"proposal-{number}", "\n\n".join(parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    documents = [proposal(number) for number in range(60)]
    write_tasks(find_proposals(documents, DOMAIN), author_names(documents), DOMAIN, place)
    return place


@pytest.mark.parametrize("name", ["section", "proposal", "order", "markup"])
def test_a_task_reads_back_and_its_splits_share_no_proposal(folder: Path, name: str) -> None:
    task = load_task(str(folder / f"{name}.yaml"))
    seen = {}
    for split, most in (("train", 30), ("dev", 10), ("test", 10)):
        assert len(task.read(split)) == most
        lines = (folder / name / f"{split}.jsonl").read_text().splitlines()
        seen[split] = {word for line in lines for word in numbers(json.loads(line))}
    assert not seen["train"] & seen["dev"]
    assert not seen["train"] & seen["test"]
    assert not seen["dev"] & seen["test"]


def numbers(record: Mapping[str, object]) -> list[str]:
    """The proposals that a record's text is from."""
    text = " ".join(" ".join(value) if isinstance(value, list) else str(value) for value in record.values())
    return [word for word in text.split() if word.startswith("number")]


def test_documents_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc/guide.md").write_text("some text " * 50)
    (tmp_path / "doc/changelog.txt").write_text("some change " * 50)
    (tmp_path / "doc/latin.txt").write_bytes(b"\xe9t\xe9 " * 200)
    (tmp_path / "doc/program.py").write_text("print(1)\n" * 100)
    records = tmp_path / "own.jsonl"
    records.write_text('{"id": "a", "text": "other text"}\n{"text": "third"}\n')
    names = [document.name for document in read_documents([tmp_path / "doc", records])]
    assert names[0].endswith("guide.md")
    assert names[1:] == ["a", "own.jsonl:2"]
    records.write_text('{"id": "a"}\n')
    with pytest.raises(OptionError, match=r"own.jsonl, line 1"):
        list(read_documents([records]))
    with pytest.raises(OptionError, match="absent: "):
        list(read_documents([tmp_path / "absent"]))


def test_long_paragraphs_come_once_and_headings_stay() -> None:
    licence, heading = "You may use this as you like, and copy it, and change it. " * 3, "Motivation"
    texts = [f"{heading}\n\n{licence}\n\n{f'text of number {number} ' * 30}" for number in range(3)]
    kept = [
        one.text for one in without_repeats(Document(str(number), text) for number, text in enumerate(texts))
    ]
    assert [text.count(licence) for text in kept] == [1, 0, 0]
    assert all(text.startswith(heading) for text in kept)
