"""Small tasks that can be learnt, over the words of the test tokenizers, and small models to fine-tune on them.

`task`: of every kind, for fine-tuning. `scored` and `triplets`: sentences of two topics, for embeddings. `task_files`:
YAML files of two tasks, for evaluations.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from launcher.after.finetune.pretrained import LocalModel, folder_digest
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.tasks.task import Task, parse_task
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, export


class Models(Protocol):
    def __call__(self, family: str, length: int = ...) -> LocalModel:
        """A model of the family, made once and only read."""


LENGTH = 96
NAMES = ("rank", "machine", "workers")
PLAIN = [word for word in WORDS if word not in ("falls", "back", *NAMES)]
QUICK = FinetuneSettings(lr=3e-3, epochs=2, batch=8, warmup=0.1)
HEADERS: Mapping[str, str] = {
    "classification": "fields: {first: text, label: label}\nlabels: [loses, wins]\nmetrics: [accuracy, matthews]",
    "pair_classification": "fields: {first: text, second: other, label: label}\nlabels: [neither, either]\n"
    "metrics: [accuracy]",
    "regression": "fields: {first: text, second: other, label: score}\nmetrics: [pearson, spearman]\n"
    "score_range: [0, 4]",
    "tagging": "fields: {words: words, tags: tags}\nlabels: [O, B-NAME, I-NAME]\nmetrics: [entity_f1, accuracy]",
    "span": "fields: {id: id, question: question, context: context, answers: answers}\nno_answer: true\n"
    "metrics: [answer_f1, exact_match]",
}


def model(family: str, folder: Path, *, length: int = LENGTH, layers: int = 2) -> LocalModel:
    """A random model of one of `FAMILIES`, exported into `folder`."""
    described = FAMILIES[family]
    export(
        replace(described, config=described.config.model_copy(update={"max_length": length, "layers": layers})),
        folder,
    )
    place = folder / described.folders[-1]
    return LocalModel(str(folder), None, place, folder_digest(place))


def task(kind: str, folder: Path, *, train: int = 48, dev: int = 24, extra: str = "") -> Task:
    """A task that can be learnt, its files in `folder`. `extra`: further lines of its YAML."""
    for split, count, seed in (("train", train, 1), ("dev", dev, 2)):
        draw = random.Random(f"{kind} {seed}")
        lines = [json.dumps({"id": f"{split}-{index}", **_MAKERS[kind](draw)}) for index in range(count)]
        (folder / f"{kind}.{split}.jsonl").write_text("\n".join(lines) + "\n")
    return parse_task(description(kind) + extra, kind, str(folder))


def description(kind: str) -> str:
    return (
        f"name: {kind.replace('_', '-')}\nkind: {kind}\npublished: in the tests\nformat: jsonl\n"
        f"files: {{train: {kind}.train.jsonl, dev: {kind}.dev.jsonl}}\n{HEADERS[kind]}\n"
    )


def _words(draw: random.Random, least: int = 4, most: int = 9) -> list[str]:
    return draw.choices(PLAIN, k=draw.randint(least, most))


def _classification(draw: random.Random) -> dict[str, object]:
    """Which of two words is there."""
    words, wins = _words(draw), draw.random() < 0.5
    words.insert(draw.randrange(len(words)), "back" if wins else "falls")
    return {"text": " ".join(words), "label": "wins" if wins else "loses"}


def _pair(draw: random.Random) -> dict[str, object]:
    """Whether one of the two texts has the better of two words."""
    texts = [_words(draw, 2, 5), _words(draw, 2, 5)]
    wins = [draw.random() < 0.3 for _ in texts]
    for words, better in zip(texts, wins, strict=True):
        words.insert(0, "back" if better else "falls")
    label = "either" if any(wins) else "neither"
    return {"text": " ".join(texts[0]), "other": " ".join(texts[1]), "label": label}


def _regression(draw: random.Random) -> dict[str, object]:
    """How often one word is in both."""
    texts = [_words(draw), _words(draw)]
    count = draw.randrange(5)
    for index in range(count):
        texts[index % 2].insert(draw.randrange(4), "back")
    return {"text": " ".join(texts[0]), "other": " ".join(texts[1]), "score": float(count)}


def _tagging(draw: random.Random) -> dict[str, object]:
    """Names, some of two words."""
    words: list[str] = []
    tags: list[str] = []
    for _ in range(draw.randint(4, 10)):
        if draw.random() < 0.3:
            length = draw.choice([1, 2])
            words += draw.choices(NAMES, k=length)
            tags += ["B-NAME", "I-NAME"][:length]
        words.append(draw.choice(PLAIN))
        tags.append("O")
    return {"words": words, "tags": tags}


def _span(draw: random.Random) -> dict[str, object]:
    """The name in the context, if there is one."""
    words = _words(draw, 6, 12)
    if draw.random() < 0.25:
        return {"question": "the rank", "context": " ".join(words), "answers": []}
    place, name = draw.randrange(len(words)), draw.choice(NAMES)
    start = len(" ".join([*words[:place], ""]))
    words.insert(place, name)
    return {
        "question": "the rank",
        "context": " ".join(words),
        "answers": [{"text": name, "answer_start": start}],
    }


_MAKERS: Mapping[str, Callable[[random.Random], dict[str, object]]] = {
    "classification": _classification,
    "pair_classification": _pair,
    "regression": _regression,
    "tagging": _tagging,
    "span": _span,
}


TOPICS = (WORDS[: len(WORDS) // 2], WORDS[len(WORDS) // 2 :])


def sentence(draw: random.Random, topic: int) -> str:
    return " ".join(draw.choices(TOPICS[topic], k=draw.randint(3, 8)))


def scored(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Pairs: of one topic 5, of two topics 0; `relation` says the same in words."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        first, second = draw.randrange(2), draw.randrange(2)
        same = first == second
        rows.append(
            {
                "a": sentence(draw, first),
                "b": sentence(draw, second),
                "score": 5.0 * same,
                "relation": "same" if same else "other",
            }
        )
    return rows


def triplets(count: int, seed: int = 0) -> list[dict[str, object]]:
    """An anchor, a sentence of its topic, and one of the other's."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        topic = draw.randrange(2)
        texts = [sentence(draw, which) for which in (topic, topic, 1 - topic)]
        rows.append(dict(zip(("a", "p", "n"), texts, strict=True)))
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_files(folder: str, train: int = 60, test: int = 40) -> Sequence[str]:
    """YAML files of two small tasks in `folder`, with their data: one of classification, one of similarity. A text's
    class is whether a word is in it; two texts' score is how many words they share."""
    draw, root = random.Random(5), Path(folder)
    others = [word for word in WORDS if word != "machine"]

    def labelled(label: int) -> str:
        words = draw.choices(others, k=6) + ["machine"] * label
        draw.shuffle(words)
        return " ".join(words)

    for split, count in (("train", train), ("dev", test), ("test", test)):
        lines = [f"{labelled(number % 2)}\t{number % 2}" for number in range(count)]
        (root / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    pairs = []
    for number in range(test):
        first = draw.sample(others, 6)
        second = draw.sample(first, number % 6) + draw.sample(others, 6 - number % 6)
        pairs.append(f"{len(set(first) & set(second))}\t{' '.join(first)}\t{' '.join(second)}")
    (root / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    common = "published: nowhere\nformat: tsv\n"
    (root / "word.yaml").write_text(
        f"name: word\nkind: classification\n{common}fields: {{first: 1, label: 2}}\nlabels: ['0', '1']\n"
        "files: {train: train.tsv, dev: dev.tsv, test: test.tsv}\nmetrics: [accuracy]\n"
    )
    (root / "shared.yaml").write_text(
        f"name: shared\nkind: similarity\n{common}fields: {{first: 2, second: 3, label: 1}}\nscore_range: [0, 6]\n"
        "files: {test: pairs.tsv}\nmetrics: [spearman]\n"
    )
    return [str(root / "word.yaml"), str(root / "shared.yaml")]
