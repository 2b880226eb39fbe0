"""A task of every kind over real text: sentiment and similarity as published, the others made of prose whose labels
somebody wrote. All is in lower case, so that capitals and marks, of which labels are made, give nothing away.

    FOLDER/prose/*.jsonl.gz       {"id", "text"} a line: documents in Markdown or reStructuredText
    FOLDER/sst2/{train,dev}.tsv   sentence, label 0 or 1
    FOLDER/sts/{2014,2015}-headlines.test.tsv     score, sentence, sentence

Documents with one hash in five are those of dev; nothing of them is in a training split or in `plain_text`.
"""

import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.after.tasks.task import Task, loads

Record = dict[str, object]
Sentence = list[tuple[str, str]]  # words, each with its tag
KINDS = (
    "classification",
    "pair_classification",
    "regression",
    "tagging",
    "span",
    "similarity",
    "retrieval",
)
TRAIN, DEV = 2000, 500  # examples at most
_WORDS_LEAST, _WORDS_MOST = 6, 24  # of a sentence
_CODE = re.compile(r"``([^`\n]+)``|`([^`\n]+)`")
_MARKED = re.compile(r"[<>\[\]|*{}`_\\]|::|:\w+:|https?:")  # what is left of markup
_SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
_WORD = re.compile(r"[A-Za-z0-9'-]+|[^\sA-Za-z0-9]")
_TITLE = re.compile(r"^Title: (.+)$", re.MULTILINE)

_YAML = {
    "classification": """fields: {first: text, label: label}
format: jsonl
labels: ["0", "1"]
metrics: [accuracy]
""",
    "pair_classification": """fields: {first: text, second: other, label: label}
format: jsonl
labels: [middle, opening]
metrics: [accuracy]
""",
    "regression": """fields: {first: text, label: score}
format: jsonl
score_range: [0, 1]
metrics: [pearson]
""",
    "similarity": """files: {train: sts/2014-headlines.test.tsv, dev: sts/2015-headlines.test.tsv}
fields: {first: 2, second: 3, label: 1}
format: tsv
score_range: [0, 5]
skip_labels: [""]
metrics: [spearman]
""",
    "tagging": """fields: {words: words, tags: tags}
format: jsonl
labels: [O, B-NAME, I-NAME, B-CODE, I-CODE]
metrics: [entity_f1]
""",
    "span": """fields: {id: id, question: question, context: context, answers: answers}
format: jsonl
no_answer: true
metrics: [answer_f1]
""",
    "retrieval": """files: {dev: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels.tsv}}
format: beir
metrics: [ndcg@10]
""",
}


@dataclass(frozen=True)
class Document:
    """`paragraphs`: of running text, each as its sentences."""

    name: str
    title: str
    paragraphs: list[list[str]]

    @property
    def dev(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % 5 == 0


@cache
def documents(folder: Path) -> list[Document]:
    found = []
    for path in sorted((folder / "prose").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        found += [_document(record["id"], record["text"]) for record in records]
    return [document for document in found if document.paragraphs]


def _document(name: str, text: str) -> Document:
    given = _TITLE.search(text)
    title = given[1] if given else re.sub(r"[\d_-]+", " ", Path(name).stem)
    blocks = (block for block in re.split(r"\n\s*\n", text) if re.match(r"[A-Z`]", block))
    running = (" ".join(block.split()) for block in blocks if block.rstrip().endswith("."))
    return Document(name, title.strip(), [_SENTENCES.split(paragraph) for paragraph in running])


def plain_text(folder: Path, characters: int) -> Iterator[str]:
    """What a run is pretrained on: documents that are not dev's, one from here, one from there, in lower case."""
    left = [document for document in documents(folder) if not document.dev]
    random.Random(5).shuffle(left)
    for document in left:
        text = "\n\n".join(" ".join(_bare(sentence) for sentence in part) for part in document.paragraphs)
        yield text
        characters -= len(text)
        if characters < 0:
            return


def task(kind: str, folder: Path, out: Path) -> Task:
    """The task over the text in `folder`; what is made of it is written into `out`."""
    head = f"name: {kind.replace('_', '-')}\nkind: {kind}\npublished: here\n"
    root = folder
    if "files:" not in _YAML[kind]:
        head += f"files: {{train: {kind}.train.jsonl, dev: {kind}.dev.jsonl}}\n"
        root = out
        for split in ("train", "dev"):
            _write(out / f"{kind}.{split}.jsonl", _examples(kind, folder, split))
    elif kind == "retrieval":
        root = out
        _write_retrieval(folder, out)
    return loads(head + _YAML[kind], kind, str(root))


def _write(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _examples(kind: str, folder: Path, split: str) -> list[Record]:
    chosen = [document for document in documents(folder) if document.dev == (split == "dev")]
    draw = random.Random(kind)
    makers = {
        "pair_classification": _pairs,
        "regression": _placed,
        "tagging": _tagged,
        "span": _questions,
    }
    records = _reviews(folder, split) if kind == "classification" else list(makers[kind](chosen, draw))
    draw.shuffle(records)
    return [
        {"id": f"{split}-{n}", **record}
        for n, record in enumerate(records[: TRAIN if split == "train" else DEV])
    ]


def _reviews(folder: Path, split: str) -> list[Record]:
    rows = (line.split("\t") for line in (folder / "sst2" / f"{split}.tsv").read_text("utf-8").splitlines())
    return [{"text": text, "label": label} for text, label in rows]


def _bare(sentence: str) -> str:
    return re.sub(r"[`*]", "", sentence).lower()


def _pairs(chosen: list[Document], draw: random.Random) -> Iterator[Record]:
    """Whether the second text opens the document of that title, or is of its middle."""
    for document in chosen:
        last = len(document.paragraphs) - 1
        for label, number in (("opening", 0), ("middle", draw.randint(1, max(1, last)))):
            if number <= last:
                text = " ".join(_bare(" ".join(document.paragraphs[number])).split()[: 2 * _WORDS_MOST])
                yield {"text": document.title.lower(), "other": text, "label": label}


def _placed(chosen: list[Document], draw: random.Random) -> Iterator[Record]:
    """How far down its document a paragraph is, of documents with ten and more."""
    for document in chosen:
        last = len(document.paragraphs) - 1
        for number, part in enumerate(document.paragraphs if last >= 9 else ()):
            text = " ".join(_bare(" ".join(part)).split()[: 2 * _WORDS_MOST])
            yield {"text": text, "score": round(number / last, 3)}


def _sentences(chosen: list[Document]) -> Iterator[Sentence]:
    for document in chosen:
        for part in document.paragraphs:
            for sentence in part:
                words = _words(sentence)
                if words and _WORDS_LEAST <= len(words) <= _WORDS_MOST:
                    yield words


def _words(sentence: str) -> Sentence | None:
    """Words in lower case; None where markup is left. Code is what is marked so, a name what has a capital within."""
    if _MARKED.search(_CODE.sub(" ", sentence)):
        return None
    words: Sentence = []
    end = 0
    for found in [*_CODE.finditer(sentence), None]:
        for word in _WORD.findall(sentence[end : found.start() if found else None]):
            name = word[0].isupper() and len(words) > 0 and word != "I"
            words.append((word.lower(), _tag("NAME" if name else None, words)))
        if found:
            code = (found[1] or found[2]).lower().split()
            words += [(word, "I-CODE" if n else "B-CODE") for n, word in enumerate(code)]
            end = found.end()
    return words


def _tag(entity: str | None, before: Sentence) -> str:
    if entity is None:
        return "O"
    return f"{'I' if before[-1][1].endswith(entity) else 'B'}-{entity}"


def _tagged(chosen: list[Document], draw: random.Random) -> Iterator[Record]:
    """What is a name and what is code."""
    for words in _sentences(chosen):
        if any(tag != "O" for _, tag in words):
            yield {"words": [word for word, _ in words], "tags": [tag for _, tag in words]}


def _questions(chosen: list[Document], draw: random.Random) -> Iterator[Record]:
    """Which code a sentence has; one in five has none."""
    for words in _sentences(chosen):
        tags = [tag for _, tag in words]
        code, context = tags.count("B-CODE"), " ".join(word for word, _ in words)
        if code > 1 or (code == 0 and draw.random() > 0.05):
            continue
        answers: list[Record] = []
        if code:
            text = " ".join(word for word, tag in words if tag.endswith("CODE"))
            start = len(" ".join([*(word for word, _ in words[: tags.index("B-CODE")]), ""]))
            answers = [{"text": text, "answer_start": start}]
        yield {"question": "which code is named?", "context": context, "answers": answers}


def _openings(folder: Path, *, dev: bool) -> Iterator[tuple[str, str]]:
    """Title and first paragraph of each document."""
    for document in documents(folder):
        if document.dev == dev:
            opening = " ".join(document.paragraphs[0])
            yield document.title.lower(), " ".join(_bare(opening).split()[: 2 * _WORDS_MOST])


def _write_retrieval(folder: Path, out: Path) -> None:
    """Queries are titles, documents first paragraphs; pairs.jsonl has those that are to be trained on."""
    found = list(_openings(folder, dev=True))
    _write(out / "corpus.jsonl", [{"_id": str(n), "text": text} for n, (_, text) in enumerate(found)])
    _write(out / "queries.jsonl", [{"_id": str(n), "text": title} for n, (title, _) in enumerate(found)])
    lines = "".join(f"{n}\t{n}\t1\n" for n in range(len(found)))
    (out / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    pairs: list[Record] = [{"query": title, "positive": text} for title, text in _openings(folder, dev=False)]
    _write(out / "pairs.jsonl", pairs)
