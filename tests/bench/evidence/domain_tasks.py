"""Tasks of the text's own domain, whose labels its markup holds: a folder of files and a YAML for each task.

    section     the section that a passage is from (classification)
    proposal    whether two passages are of one proposal (pair classification)
    order       whether two passages that follow each other are in order (pair classification)
    markup      which words are code, and which are names of authors (tagging)

Passages of dev and test are of proposals that are kept from pretraining; those of train are of others, whose text is
trained on without labels.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import yaml

from .documents import Document
from .sections import Paragraph, Section, sections
from .settings import Domain

Split = Literal["train", "dev", "test"]
Record = dict[str, object]

_LABELLED = 3  # different sections that make a document a proposal
_AUTHORS = re.compile(r"^Author: *((?:.+\n)(?:[ \t]+.+\n)*)", re.MULTILINE)
_NAME = re.compile(r"[A-Z][\w.'-]*(?: [A-Za-z][\w.'-]*)+")
_LONGEST = 60  # words of a tagged passage


@dataclass(frozen=True)
class Proposal:
    """A document with sections that are labels. `split`: by a hash of its name."""

    name: str
    split: Split
    sections: tuple[Section, ...]


def find_proposals(documents: Iterable[Document], domain: Domain) -> list[Proposal]:
    """Those of the documents that have three of the sections or more."""
    titles = {title for headings in domain.sections.values() for title in headings}
    found = []
    for document in documents:
        parts = tuple(part for part in sections(document) if part.paragraphs)
        if len({part.title for part in parts} & titles) >= _LABELLED:
            found.append(Proposal(document.name, _split(document.name, domain), parts))
    return found


def author_names(documents: Iterable[Document]) -> set[str]:
    """Full names, of two words or more, in the headers of documents."""
    return {
        name.strip(" .")
        for document in documents
        for header in _AUTHORS.findall(document.text[:4000])
        for name in _NAME.findall(re.sub(r"<[^>]*>", "", header))
    }


def write_tasks(
    proposals: Sequence[Proposal], names: set[str], domain: Domain, folder: Path
) -> dict[str, Path]:
    """The tasks' YAML files by name."""
    draw = random.Random(0)
    by_split = {
        split: [proposal for proposal in proposals if proposal.split == split]
        for split in ("train", "dev", "test")
    }
    labels = {title: label for label, titles in domain.sections.items() for title in titles}
    examples: Mapping[str, Mapping[str, list[Record]]] = {
        "section": {split: list(_sections(found, labels)) for split, found in by_split.items()},
        "proposal": {split: list(_pairs(found, draw)) for split, found in by_split.items()},
        "order": {split: list(_ordered(found, draw)) for split, found in by_split.items()},
        "markup": {split: list(_tagged(found, names)) for split, found in by_split.items()},
    }
    described = _descriptions(domain)
    most = {"train": domain.train_examples, "dev": domain.dev_examples, "test": domain.test_examples}
    for name, splits in examples.items():
        for split, records in splits.items():
            draw.shuffle(records)
            if name == "markup":  # few have names of authors: those are the first that are taken
                records.sort(key=lambda record: "B-NAME" not in str(record["tags"]))
            _write_lines(folder / name / f"{split}.jsonl", records[: most[split]])
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(described[name], sort_keys=False), "utf-8")
    return {name: folder / f"{name}.yaml" for name in examples}


def _descriptions(domain: Domain) -> dict[str, dict[str, object]]:
    pair: dict[str, object] = {
        "kind": "pair_classification",
        "fields": {"first": "first", "second": "second", "label": "label"},
    }
    special: dict[str, dict[str, object]] = {
        "section": {
            "kind": "classification",
            "fields": {"first": "text", "label": "label"},
            "labels": list(domain.sections),
        },
        "proposal": pair | {"labels": ["other", "same"]},
        "order": pair | {"labels": ["swapped", "ordered"]},
        "markup": {
            "kind": "tagging",
            "fields": {"words": "words", "tags": "tags"},
            "labels": ["O", "B-CODE", "I-CODE", "B-NAME", "I-NAME"],
            "metrics": ["entity_f1"],
        },
    }
    return {
        name: {
            "name": name,
            "published": "made of the text by tests/bench/evidence",
            "files": {split: f"{name}/{split}.jsonl" for split in ("train", "dev", "test")},
            "format": "jsonl",
            "metrics": ["accuracy"],
        }
        | own
        for name, own in special.items()
    }


def _split(name: str, domain: Domain) -> Split:
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
    return "test" if place < domain.test else "dev" if place < domain.test + domain.dev else "train"


def _sections(proposals: Iterable[Proposal], labels: Mapping[str, str]) -> Iterator[Record]:
    """The first passage of each section, which is about what the section is for."""
    for proposal in proposals:
        for section in proposal.sections:
            if section.title in labels:
                yield {"text": section.paragraphs[0].text, "label": labels[section.title]}


def _pairs(proposals: Sequence[Proposal], draw: random.Random) -> Iterator[Record]:
    """Passages of two sections of a proposal; of every second pair, the second is of another proposal."""
    for proposal in proposals:
        for first, second in pairwise(proposal.sections):
            other = draw.choice(proposals)
            same = other is proposal or draw.random() < 0.5
            partner = second if same else draw.choice(other.sections)
            yield {
                "first": draw.choice(first.paragraphs).text,
                "second": draw.choice(partner.paragraphs).text,
                "label": "same" if same else "other",
            }


def _ordered(proposals: Iterable[Proposal], draw: random.Random) -> Iterator[Record]:
    for proposal in proposals:
        for section in proposal.sections:
            for pair in list(pairwise(section.paragraphs))[::2]:
                ordered = draw.random() < 0.5
                first, second = pair if ordered else reversed(pair)
                label = "ordered" if ordered else "swapped"
                yield {"first": first.text, "second": second.text, "label": label}


def _tagged(proposals: Iterable[Proposal], names: set[str]) -> Iterator[Record]:
    for proposal in proposals:
        for section in proposal.sections:
            for paragraph in section.paragraphs:
                words, tags = _tags(paragraph, names)
                if set(tags) != {"O"}:
                    yield {"words": words[:_LONGEST], "tags": tags[:_LONGEST]}


def _tags(paragraph: Paragraph, names: set[str]) -> tuple[list[str], list[str]]:
    words = [word for word, _ in paragraph.words]
    tags: list[str] = []
    for _, code in paragraph.words:
        inside = bool(tags) and tags[-1] != "O"
        tags.append("O" if not code else "I-CODE" if inside else "B-CODE")
    for start in range(len(words)):
        for length in (4, 3, 2):
            if " ".join(words[start : start + length]) in names:
                tags[start : start + length] = ["B-NAME", *["I-NAME"] * (length - 1)]
                break
    return words, tags


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
