"""Words are those of `tokenizers`, and are counted alike in any order, by any number of processes, in little memory."""

import os
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from data_service.processes import temporary_folder
from data_service.store.errors import OutOfSpace
from data_service.tokenizers.word_counts import WordCounts, count_words
from data_service.tokenizers.word_splits import (
    RUN_CHARACTERS,
    BertSplitter,
    ByteBpeSplitter,
    SentencePieceSplitter,
    WordSplitter,
)
from data_service.tokenizers.words import BYTES_BY_LETTER
from tests.support.faults.process import files_limited_to

ODD = (
    *(" ", "  ", "\n", "\n\n", "\t", " \t", "\r\n", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u2028"),
    *(
        "\u3000",
        "'s",
        "'ll",
        "'",
        "don't",
        "a",
        "foo",
        "Zed",
        "12",
        "½",
        "²",
        "_",
        "-",
        "...",
        "é",
        "e\u0301",
    ),
    *("\u0301", "日本", "語", "カ", "ｱ", "ﬁ", "Ⅷ", "①", "\u200d", "🙂", "\u00a8", "İ", "ẞ", "σς", "\u2585"),
    *("\u2581", "\0", "\ufffd", "\u180e", "\u200b", "가", "क्या", "\U0001f1e6", "\uffff"),
)


def odd_text(random: Random, length: int = 60) -> str:
    def part() -> str:
        draw = random.random()
        if draw < 0.7:
            return random.choice(ODD)
        if draw < 0.8:
            return "".join(random.choices(string.ascii_letters, k=random.randint(1, 9)))
        code = random.randrange(0x3000 if draw < 0.97 else sys.maxunicode)
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    return "".join(part() for _ in range(random.randint(1, length)))


def gpt2_words(text: str) -> list[str]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    return [bytes(BYTES_BY_LETTER[letter] for letter in word).decode() for word, _ in split(text)]


def bert_words(text: str, normalizer: normalizers.Normalizer) -> list[str]:
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    return [word for word, _ in split(normalizer.normalize_str(text))]


def line_words(text: str, normalizer: normalizers.Normalizer) -> list[str]:
    lines = normalizer.normalize_str(text).replace("\u2585", "\n").splitlines()
    return [word for line in lines for word in line.split(" ") if word]


def nfkc(*, lowercase: bool) -> normalizers.Normalizer:
    case = [normalizers.Lowercase()] if lowercase else []
    return normalizers.Sequence([normalizers.NFKC(), *case, normalizers.Replace(Regex(r"\s"), " ")])


def bert(*, lowercase: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)


WAYS: list[tuple[Callable[[], WordSplitter], Callable[[str], list[str]]]] = [
    (ByteBpeSplitter, gpt2_words),
    *(
        (partial(kind, made, lowercase), partial(by_library, normalizer=made))
        for kind, normalizer, by_library in (
            (BertSplitter, bert, bert_words),
            (SentencePieceSplitter, nfkc, line_words),
        )
        for lowercase in (False, True)
        for made in (normalizer(lowercase=lowercase),)
    ),
]


def counted(texts: list[str], splitter: Callable[[], WordSplitter]) -> WordCounts:
    return count_words(texts, splitter, 1 << 40)


def by_word(counts: WordCounts) -> dict[str, int]:
    return dict(zip(counts.words, counts.counts.tolist(), strict=True))


@pytest.mark.parametrize(("splitter", "by_library"), WAYS)
def test_words_are_the_librarys(
    splitter: Callable[[], WordSplitter],
    by_library: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In windows, too, which are cut between any two words."""
    monkeypatch.setattr("data_service.tokenizers.word_splits._WINDOW_CHARACTERS", 40)
    texts = [odd_text(Random(seed)) for seed in range(1500)]
    counts = counted(texts, splitter)
    assert by_word(counts) == Counter(word for text in texts for word in by_library(text))
    assert counts.words == sorted(counts.words)
    assert (counts.occurrences, counts.left_out) == (sum(counts.counts), 0)


@pytest.mark.parametrize(("splitter", "by_library"), WAYS[::2])
def test_every_character_between_two_of_each_class(
    splitter: Callable[[], WordSplitter], by_library: Callable[[str], list[str]]
) -> None:
    characters = [chr(code) for code in range(0x3100) if code not in range(0xD800, 0xE000)]
    texts = [f"a{c}b {c}{c} 1{c}2 !{c}? {c}" for c in characters]
    assert by_word(counted(texts, splitter)) == Counter(word for text in texts for word in by_library(text))


def most_frequent(every: Counter[str], limit: int) -> dict[str, int]:
    kept: dict[str, int] = {}
    for word, count in sorted(every.items(), key=lambda item: (-item[1], item[0])):
        limit -= len(word.encode()) + 1
        if limit < 0:
            break
        kept[word] = count
    return kept


@pytest.mark.parametrize(("limit", "workers"), [(1, 1), (400, 2), (1 << 20, 1)])
def test_the_most_frequent_words_are_kept_of_any_order_and_processes(
    limit: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables and files so small that each is written and divided many times."""
    monkeypatch.setattr("data_service.tokenizers.word_counts._MAX_TABLE_PIECES", 50)
    monkeypatch.setattr("data_service.tokenizers.word_counts._MAX_FILE_BYTES", 200)
    random = Random(limit)
    texts = [odd_text(random, 200) for _ in range(15)]
    every = Counter(word for text in texts for word in gpt2_words(text))
    for processes in {1, workers}:
        random.shuffle(texts)
        counts = count_words(texts, ByteBpeSplitter, limit, processes)
        assert by_word(counts) == most_frequent(every, limit)
        assert counts.occurrences == every.total()
        assert counts.left_out == every.total() - sum(counts.counts)


@pytest.mark.parametrize(("splitter", "_"), WAYS)
def test_longer_runs_are_cut(splitter: Callable[[], WordSplitter], _: object) -> None:
    counts = counted(["x" * (3 * RUN_CHARACTERS + 5) + " y"], splitter)
    assert sorted(len(word.strip()) for word in counts.words) == [1, 5, RUN_CHARACTERS]


MEASURED = """
import resource, sys, time
from random import Random
from data_service.tokenizers.word_counts import count_words
from data_service.tokenizers.word_splits import ByteBpeSplitter
megabytes = int(sys.argv[2])
random = Random(1)
text = {
    "one line": lambda: "some words of a line " * (megabytes * 50_000),
    "one letter": lambda: "a" * (megabytes * 1_000_000),
    "distinct": lambda: " ".join(f"{random.getrange(1 << 30):x}" for _ in range(megabytes * 30_000)),
}[sys.argv[1]]()
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
counts = count_words([text], ByteBpeSplitter, 1 << 20)
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, counts.occurrences)
""".replace("getrange", "randrange")


@pytest.mark.parametrize("megabytes", [2, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize("text", ["one line", "one letter", "distinct"])
def test_time_is_linear_in_the_length_of_a_line_and_memory_bounded(text: str, megabytes: int) -> None:
    seconds, kilobytes = [], []
    for size in (megabytes, 4 * megabytes):
        command = [sys.executable, "-c", MEASURED, text, str(size)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        seconds.append(float(said[0]))
        kilobytes.append(int(said[1]))
    assert seconds[1] < 10 * seconds[0] + 1
    assert kilobytes[1] < 1_200_000


def test_a_full_disk_names_the_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = " ".join(f"{number:x}" for number in range(20_000))
    for workers in (1, 2):
        with files_limited_to(1000), pytest.raises(OutOfSpace, match="TMPDIR") as raised:
            count_words([text], ByteBpeSplitter, 1 << 20, workers)
        assert str(tmp_path) in raised.value.problem
        assert not list(tmp_path.iterdir())


ENDLESS = """
from itertools import count
from data_service.tokenizers import word_counts
from data_service.tokenizers.word_splits import ByteBpeSplitter
if __name__ == "__main__":
    print("begun", flush=True)
    word_counts.count_words((f"word {n} and {n * n}" for n in count()), ByteBpeSplitter, 1 << 20, 2)
"""


def test_if_it_is_killed_its_processes_end_and_its_files_go_with_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary, program = tmp_path / "temporary", tmp_path / "program.py"
    temporary.mkdir()
    program.write_text(ENDLESS)
    process = subprocess.Popen([sys.executable, program], env=os.environ | {"TMPDIR": str(temporary)})
    while len(psutil.Process(process.pid).children()) < 2:
        time.sleep(0.05)
    time.sleep(Random().random())
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with temporary_folder("next") as folder:
        assert list(temporary.iterdir()) == [folder]
