"""The text of a comparison, made once: what is trained on, the tasks, and pairs of texts."""

import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.app.cli.demo_path import python_documentation
from launcher.errors import OptionError

from .documents import Document, read_documents, without_repeats
from .domain_tasks import Proposal, author_names, find_proposals, write_tasks
from .place import Place

_FEWEST_WORDS = 4  # of a heading that says what a passage is about, its document's title included


@dataclass(frozen=True)
class Given:
    """What a comparison is made of.

    Attributes:
        text: files and folders of English; Python's own documentation comes with them.
        sst2: folder with train.tsv, dev.tsv and test.tsv, each `sentence<TAB>label`.
        sts: files with `score<TAB>sentence<TAB>sentence`, scores from 0 to 5.
    """

    text: tuple[Path, ...]
    sst2: Path
    sts: tuple[Path, ...]


def prepare_text(place: Place, given: Given) -> None:
    """Documents to train on, tasks and pairs, in `place`; what is there already stays.

    Of SST-2 only the sentences of train are trained on, without labels.

    Raises OptionError: a file that is not there, or not as it should be.
    """
    ready = place.text / "ready"
    if ready.exists():
        return
    python = (Document(name, text) for name, text in python_documentation())
    documents = [*read_documents(given.text), *python]
    proposals = find_proposals(documents, place.comparison.domain)
    apart = {proposal.name for proposal in proposals if proposal.split != "train"}
    kept = [document for document in documents if document.name not in apart]
    _write(place.text / "technical", ({"text": one.text} for one in without_repeats(kept)))
    _write(place.text / "reviews", ({"text": sentence} for sentence in _sentences(given.sst2 / "train.tsv")))
    _write(place.text / "pairs", _pairs(proposals, kept))
    place.tasks.mkdir(parents=True, exist_ok=True)
    write_tasks(proposals, author_names(documents), place.comparison.domain, place.tasks)
    _copy_sst2(given.sst2, place.tasks)
    for file in given.sts:
        _copy_sts(file, place.tasks)
    ready.touch()


def _pairs(proposals: Sequence[Proposal], documents: Sequence[Document]) -> Iterator[Mapping[str, str]]:
    """What a section is called, and how it begins."""
    titles = {document.name: title_of(document) for document in documents}
    for proposal in proposals:
        for section in proposal.sections:
            query = f"{titles.get(proposal.name, '')} {section.title}".strip()
            if proposal.name in titles and len(query.split()) >= _FEWEST_WORDS:
                yield {"query": query, "positive": section.paragraphs[0].text}


def title_of(document: Document) -> str:
    """Of a proposal: what its header, or else its name, says."""
    for line in document.text.splitlines()[:12]:
        if line.startswith("Title:"):
            return line.removeprefix("Title:").strip()
    return " ".join(Path(document.name).stem.split("-")[1:])


def _sentences(file: Path) -> list[str]:
    return [row[0] for row in _rows(file, 2)]


def _rows(file: Path, columns: int) -> list[list[str]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    except OSError as error:
        raise OptionError(
            f"{file} cannot be read: {error.strerror}", remedy="give the published files"
        ) from error
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise OptionError(
                f"{file}, line {number}: {len(row)} columns, not {columns}", remedy="give the published files"
            )
    return rows


def _write(folder: Path, records: Iterable[Mapping[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "text.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _copy_sst2(folder: Path, tasks: Path) -> None:
    (tasks / "sst2").mkdir(exist_ok=True)
    for split in ("train", "dev", "test"):
        _rows(folder / f"{split}.tsv", 2)
        shutil.copyfile(folder / f"{split}.tsv", tasks / "sst2" / f"{split}.tsv")
    task = {
        "name": "sst2",
        "kind": "classification",
        "published": "https://nlp.stanford.edu/sentiment (sentences, two classes)",
        "files": {split: f"sst2/{split}.tsv" for split in ("train", "dev", "test")},
        "format": "tsv",
        "fields": {"first": 1, "label": 2},
        "labels": ["0", "1"],
        "metrics": ["accuracy"],
    }
    (tasks / "sst2.yaml").write_text(yaml.safe_dump(task, sort_keys=False), "utf-8")


def _copy_sts(file: Path, tasks: Path) -> None:
    name = f"sts-{file.name.split('.')[0]}"
    _rows(file, 3)
    (tasks / name).mkdir(exist_ok=True)
    shutil.copyfile(file, tasks / name / "test.tsv")
    task = {
        "name": name,
        "kind": "similarity",
        "published": "SemEval, semantic textual similarity",
        "files": {"test": f"{name}/test.tsv"},
        "format": "tsv",
        "fields": {"first": 2, "second": 3, "label": 1},
        "score_range": [0, 5],
        "skip_labels": [""],
        "metrics": ["spearman", "pearson"],
    }
    (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), "utf-8")
