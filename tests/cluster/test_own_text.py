"""Own text of several alphabets to a fine-tuned model, and the demo on own text, as commands."""

import csv
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checks.figures import ensure_possible
from tests.support.checks.silence import seen

SIZE = 1_000_000
MOST_SILENT_S = 10.0  # on a machine that has nothing else to do
pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(3600)]


def paragraphs(size: int, seed: int = 1) -> str:
    """Paragraphs of made-up words of unequal frequency; no two alike."""
    draw = random.Random(seed)
    words = [f"w{int(draw.paretovariate(0.7)) % 5000}" for _ in range(20_000)]
    found, length = list[str](), 0
    while length < size:
        sentences = (
            " ".join(draw.choices(words, k=draw.randint(4, 20))).capitalize() + "." for _ in range(draw.randint(2, 8))
        )
        found.append(" ".join(sentences))
        length += len(found[-1]) + 2
    return "\n\n".join(found)


def chinese(size: int) -> str:
    draw = random.Random(2)
    marks = [chr(0x4E00 + int(draw.paretovariate(0.5)) % 3000) for _ in range(20_000)]
    return "".join("".join(draw.choices(marks, k=draw.randint(5, 40))) + "。" for _ in range(size // 70))


def one_text(folder: Path) -> Path:
    (folder / "a.txt").write_text(paragraphs(SIZE))
    return folder / "a.txt"


def in_chinese(folder: Path) -> Path:
    (folder / "a.txt").write_text(chinese(SIZE))
    return folder / "a.txt"


def few_long_lines(folder: Path) -> Path:
    texts = [paragraphs(SIZE // 4, seed) for seed in range(4)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "a.jsonl"


@dataclass(frozen=True)
class Alphabet:
    """Text and a labelled table as people of some country keep them.

    Attributes:
        letters: of which words are made.
        end, space: of a sentence, between words.
        encoding: of all files; `utf-16` writes a byte order mark, and needs no option.
        delimiter: of the table; `table`: the text is one, too, else it is a .txt of paragraphs.
    """

    folder: str
    letters: str
    end: str
    space: str
    encoding: str
    delimiter: str
    table: bool

    @property
    def options(self) -> list[str]:
        """What `tokenizer train` and `corpus build` have to be told."""
        declared = [] if self.encoding == "utf-16" else ["--encoding", self.encoding]
        return [*declared, *(["--text-field", "Inhalt"] if self.table else [])]

    def sentences(self, count: int, seed: int) -> list[str]:
        draw = random.Random(seed)
        words = ["".join(draw.choices(self.letters, k=draw.randint(1, 4))) for _ in range(500)]
        weights = [1 / place for place in range(1, 501)]
        lengths = [draw.randint(4, 12) for _ in range(count)]
        return [self.space.join(draw.choices(words, weights, k=length)) + self.end for length in lengths]

    def write(self, folder: Path) -> None:
        """The text, and `task.yaml` over a table in which the label says whether a sentence has the first letter."""
        (folder / self.folder).mkdir()
        documents = ["\n".join(self.sentences(20, seed)) for seed in range(300)]
        if self.table:
            self._write_table(
                folder / self.folder / "Briefe März.csv", ["Nummer", "Inhalt"], list(enumerate(documents))
            )
        else:
            text = folder / self.folder / "文.txt"
            text.write_text("\n\n".join(documents), encoding=self.encoding)
        for name, seed, count in (("train", 1001, 160), ("dev", 1002, 60)):
            rows = [(text, "ja" if self.letters[0] in text else "nein") for text in self.sentences(count, seed)]
            self._write_table(folder / f"{name}.csv", ["Satz", "Urteil"], rows)
        declared = "" if self.encoding == "utf-16" else f"encoding: {self.encoding}\n"
        declared += f"delimiter: {json.dumps(self.delimiter)}\n"
        (folder / "task.yaml").write_text(TASK + declared, encoding="utf-8")

    def _write_table(self, path: Path, names: list[str], rows: Sequence[tuple[object, str]]) -> None:
        with path.open("w", encoding=self.encoding, newline="") as file:
            csv.writer(file, delimiter=self.delimiter).writerows([names, *rows])


TASK = """name: judged
kind: classification
published: nowhere
files: {train: train.csv, dev: dev.csv}
format: csv
fields: {first: Satz, label: Urteil}
labels: ["nein", "ja"]
metrics: [accuracy]
finetune: {lr: 1.0e-3, epochs: 2, batch: 16, max_length: 32}
"""
GERMAN = Alphabet("Eigene Texte für Übungen", "aäbdeghilnoöpqrstuüß", ".", " ", "latin-1", ";", table=True)
CHINESE = Alphabet("中文 语料", "的一是不了人我在有他这中大来上国", "。", "", "gb18030", ",", table=False)
JAPANESE = Alphabet("かな の 文書", "あいうえおかきくけこ日本語文書ー", "。", "", "utf-16", "\t", table=False)


@pytest.mark.parametrize("alphabet", [GERMAN, CHINESE, JAPANESE], ids=lambda alphabet: alphabet.encoding)
def test_every_alphabet_to_an_exported_model_and_a_fine_tuning(tmp_path: Path, alphabet: Alphabet) -> None:
    """What goes in comes out: the exported tokenizer spells every sentence, without an unknown token."""
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

    alphabet.write(tmp_path)
    text, options = alphabet.folder, alphabet.options
    maskfleet(tmp_path, "tokenizer", "train", text, "--out", "tokenizer", *options)
    if not alphabet.table:
        options = [*options, "--txt-documents", "blank_line"]
    built = maskfleet(tmp_path, "corpus", "build", text, "--tokenizer", "tokenizer", "--out", "corpus", *options)
    assert "warning" not in built
    run, model = f"runs/{alphabet.letters}", f"Modell {alphabet.letters}"
    short = ["--set", "phases.0.steps=30", "--set", "schedule.warmup=5", "--set", "evaluation.every.steps=15"]
    maskfleet(tmp_path, "init", "roberta-base", run, "--corpus", "corpus", "--tiny", *short)
    maskfleet(tmp_path, "train", run)
    shown = maskfleet(tmp_path, "show", run, "--step", "3")
    assert sum(letter in shown for letter in alphabet.letters) > len(alphabet.letters) // 2
    maskfleet(tmp_path, "checkpoints", "export", run, "--out", model)
    exported = AutoTokenizer.from_pretrained(tmp_path / model)
    for sentence in alphabet.sentences(50, 7):
        ids = exported(sentence, add_special_tokens=False)["input_ids"]
        assert exported.decode(ids) == sentence
        assert exported.unk_token_id not in ids
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / model).num_parameters() > 0
    assert "160" in maskfleet(tmp_path, "tasks", "check", "task.yaml")
    maskfleet(tmp_path, "finetune", model, "task.yaml", "--out", "fertig")
    fine_tuned = AutoModelForSequenceClassification.from_pretrained(tmp_path / "fertig")
    assert fine_tuned.config.id2label == {0: "nein", 1: "ja"}


def maskfleet(folder: Path, *arguments: object) -> str:
    """What a command shows that is to succeed, with some sign of life at least every few seconds."""
    program = Path(sys.executable).with_name("maskfleet")
    done = seen([str(program), *map(str, arguments)], cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.text
    told = " ".join(map(str, arguments))
    print(f"| {told} | {done.seconds:.1f} | {done.cpu:.1f} | {done.silence:.1f} |")
    assert done.silence < MOST_SILENT_S * max(1.0, done.seconds / max(done.cpu, 0.1)), told
    return done.text


@pytest.mark.parametrize("write", [one_text, in_chinese, few_long_lines])
def test_the_demos_way(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "text").mkdir()
    said = maskfleet(tmp_path, "demo", write(tmp_path / "text"), "--out", "demo")
    assert len(ensure_possible(said)) > 6
    assert "paragraphs" in said
    assert "<mask>" in said
    assert (tmp_path / "demo/report.html").stat().st_size > 10_000
