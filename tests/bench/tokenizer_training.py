"""A tokenizer's training beside the trainers of `tokenizers` and of SentencePiece on the same text: seconds, CPU
seconds of all processes, and the most memory that these had at one time.

    python tests/bench/tokenizer_training.py peps.jsonl.gz rust-rfcs.jsonl.gz --megabytes 200 --kind byte_bpe
    python tests/bench/tokenizer_training.py peps.jsonl.gz --megabytes 50000 --workers 2 --no-peers

Text is streamed, never stored: the documents of the files again and again. In a quarter of them, others every time, the
letters are exchanged, by another table every time, so new words never end: some thousand a megabyte. The peers have
their own settings but for the size of the vocabulary, and are fed what we are fed.
"""

import gzip
import io
import json
import string
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Annotated, Any

import psutil
import sentencepiece
import tokenizers
import typer
from program import BenchError, note, run
from tokenizers import models, pre_tokenizers, trainers

from data_service.tokenizers.files import TRAINING_REPORT
from data_service.tokenizers.train import train_tokenizer

KINDS = ("byte_bpe", "wordpiece", "unigram", "bpe")
WAYS = ("maskfleet", "tokenizers", "sentencepiece")
_MB = 1_000_000
_LOOK_S = 0.2
_NEWS_BYTES = 1000 * _MB


@dataclass(frozen=True)
class Cost:
    """What a training took, and what it says: its pieces and, of ours, how many words it left out."""

    way: str
    megabytes: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    said: str


class Stream:
    """Iterates over `megabytes` of text, or what is read in so many minutes."""

    def __init__(self, paths: Sequence[Path], megabytes: int, minutes: float) -> None:
        lines = [line for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]
        self._texts = [json.loads(line)["text"] for line in lines]
        self._size, self._end = megabytes * _MB, time.monotonic() + 60 * minutes
        self.given = 0
        if not any(self._texts):
            raise BenchError(f"no text in {paths}", remedy="give files of JSON lines with the field `text`")

    def __iter__(self) -> Iterator[str]:
        for text in chain.from_iterable(map(self._once, count())):
            before, self.given = self.given, self.given + len(text.encode())
            yield text
            if self.given >= self._size or time.monotonic() > self._end:
                return
            if self.given // _NEWS_BYTES > before // _NEWS_BYTES:
                note(f"{self.given // _MB:,} MB read")

    def _once(self, time_through: int) -> Iterator[str]:
        random = Random(time_through)
        letters = "".join(random.sample(string.ascii_lowercase, 26))
        table = str.maketrans(string.ascii_letters, letters + letters.upper())
        return (text.translate(table) if random.random() < 0.25 else text for text in self._texts)


def train(way: str, kind: str, texts: Iterable[str], *, vocab_size: int, workers: int) -> str:
    """Train, and return what there is to say."""
    match way:
        case "maskfleet":
            ours = train_tokenizer(kind, texts, vocab_size, allow_fewer_ids=True, workers=workers)  # type: ignore[arg-type]
            report = json.loads(ours.save_files()[TRAINING_REPORT])
            return f"{ours.vocab_size:,} pieces, {report['words']:,} words, {report['left_out']:,} left out"
        case "tokenizers":
            theirs, trainer = _library(kind, vocab_size)
            theirs.train_from_iterator(texts, trainer)
            return f"{theirs.get_vocab_size():,} pieces"
        case _:
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.splitlines()),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="unigram" if kind == "unigram" else "bpe",
                hard_vocab_limit=False,
                minloglevel=2,
            )
            return f"{len(model.getvalue()):,} bytes of model"


def _library(kind: str, vocab_size: int) -> tuple[tokenizers.Tokenizer, trainers.Trainer]:
    size: dict[str, Any] = {"vocab_size": vocab_size, "show_progress": False}
    match kind:
        case "wordpiece":
            tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            return tokenizer, trainers.WordPieceTrainer(**size, special_tokens=["[UNK]"])
        case "unigram":
            tokenizer = tokenizers.Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            return tokenizer, trainers.UnigramTrainer(**size, unk_token="<unk>", special_tokens=["<unk>"])
        case _:
            tokenizer = tokenizers.Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = (
                pre_tokenizers.ByteLevel(add_prefix_space=False)
                if kind == "byte_bpe"
                else pre_tokenizers.Metaspace()
            )
            return tokenizer, trainers.BpeTrainer(**size, min_frequency=2)


def measure(way: str, arguments: Sequence[str]) -> Cost:
    """Train in a process of its own, and watch it and those that it starts."""
    began = time.monotonic()
    command = [sys.executable, __file__, *arguments, "--way", way]
    peak, cpu = 0, 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with suppress(psutil.Error):
                root = psutil.Process(process.pid)
                tree = [root, *root.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in tree))
                cpu = max(cpu, sum(sum(one.cpu_times()[:4]) for one in tree))
            time.sleep(_LOOK_S)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise BenchError(f"{way} ended with {process.returncode}", remedy="see above")
    megabytes, said = said.split("\n", 1)
    return Cost(way, int(megabytes), time.monotonic() - began, cpu, peak, said.strip())


def render(costs: Sequence[Cost], kind: str) -> str:
    lines = [f"| {kind} | MB | s | MB/s | CPU s | peak GB | |", "|---|---|---|---|---|---|---|"]
    for cost in costs:
        rates = f"{cost.seconds:.0f} | {cost.megabytes / cost.seconds:.1f} | {cost.cpu_seconds:.0f}"
        lines.append(
            f"| {cost.way} | {cost.megabytes:,} | {rates} | {cost.peak_bytes / 1e9:.2f} | {cost.said} |"
        )
    return "\n".join(lines)


def main(
    texts: Annotated[list[Path], typer.Argument(help="Files of JSON lines, packed by gzip.")],
    megabytes: int = 100,
    kind: str = "byte_bpe",
    vocab_size: int = 30_000,
    workers: int = 1,
    minutes: Annotated[float, typer.Option(help="Read no longer than this.")] = 1e6,
    peers: bool = True,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure one kind."""
    if kind not in KINDS:
        raise BenchError(f"no kind {kind}", remedy=f"give one of {', '.join(KINDS)}")
    if way:
        stream = Stream(texts, megabytes, minutes)
        said = train(way, kind, stream, vocab_size=vocab_size, workers=workers)
        typer.echo(f"{stream.given // _MB}\n{said}")
        return
    arguments = [*map(str, texts), f"--megabytes={megabytes}", f"--kind={kind}", f"--vocab-size={vocab_size}"]
    arguments += [f"--workers={workers}", f"--minutes={minutes}"]
    costs = []
    for one in WAYS if peers else WAYS[:1]:
        note(f"{one} ...")
        costs.append(measure(one, arguments))
    typer.echo(render(costs, kind))


if __name__ == "__main__":
    run(main)
