"""The stages of `maskfleet demo`: text, tokenizer, corpus, run, training, evaluation, export, report.

Every stage calls the functions behind the commands and can be repeated, so an interrupted demo continues where it
stopped. Its text is real English that every machine has: Python's documentation strings and help topics, one document
for each file. The standard library's sources are parsed, never imported or run.
"""

import ast
import hashlib
import inspect
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data import topics

from rich.console import Console

from data_service.corpus.corpus import open_corpus
from data_service.corpus.reader import read_block
from data_service.errors import TokenizerError
from data_service.ingest.build import build_corpus
from data_service.ingest.encodings import UTF_8
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.printable import one_line, shell_word
from data_service.stream.statistics import corpus_stats
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from launcher.after.export.export import export_run
from launcher.after.fill.fill import MASK, MaskFiller
from launcher.app.cli.corpus_shown import heldout_note, show_build_progress
from launcher.app.cli.options import validate_options
from launcher.app.cli.texts import default_worker_count, sample_texts
from launcher.app.companions import TRAINING_COMPANIONS
from launcher.errors import RunError
from launcher.observe.inspect.baselines import load_or_compute_baselines
from launcher.observe.inspect.report.page import write_report
from launcher.output import human_bytes, human_count, human_duration
from launcher.runtime.cluster.train import train
from launcher.runtime.recipe.load import load
from launcher.runtime.run.create import create_run, reconcile
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import token_loss
from launcher.runtime.run.record import RECORD_FILE, Run, open_run

_MIN_DOCUMENT_CHARACTERS = 200  # modules with shorter documentation are left out
_SKIP_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}

DocumentedNode = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef  # may have a docstring


def python_documentation() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each documented module of the standard library and of each help topic, without duplicates.

    A paragraph that occurs in several modules, as licences do, stays in the first one only.
    """
    seen: set[bytes] = set()
    for name, text in _documentation_texts():
        kept = [paragraph for paragraph in text.split("\n\n") if _is_first_occurrence(paragraph, seen)]
        document = "\n\n".join(kept)
        if len(document) >= _MIN_DOCUMENT_CHARACTERS:
            yield name, document


def write_documentation(path: Path) -> tuple[int, int]:
    """Write the documentation to `path`, one document per line. Return the numbers of documents and of text bytes."""
    documents = size = 0
    with path.open("w", encoding="utf-8") as lines:
        for name, text in python_documentation():
            lines.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
            documents += 1
            size += len(text.encode())
    return documents, size


def _documentation_texts() -> Iterator[tuple[str, str]]:
    for name, text in sorted(topics.topics.items()):
        yield f"topic {name}", inspect.cleandoc(text)
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIP_DIRS.intersection(relative.parts):
            yield str(relative), "\n\n".join(_docstrings(path))


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # some source files are templates, or invalid on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, DocumentedNode):
            text = ast.get_docstring(node)
            if text:
                yield text


def _is_first_occurrence(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(" ".join(paragraph.split()).encode(errors="replace"), digest_size=16).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


_VOCABULARY_SIZE = 2048  # largest number of the tokenizer's ids
_TOKENIZER_SAMPLE_BYTES = 50_000_000  # bytes of text on which the tokenizer is trained
_STAGE_COUNT = 8
_COMPRESSION_RATIO = 4  # assumed bytes of text per byte of a compressed file
_EXAMPLE_SENTENCES = (
    "Return <mask> if the object is an instance of the class.",
    "This method raises an <mask> if the value is not valid.",
    "If the file does not <mask>, an error is raised.",
)


@dataclass
class Demo:
    """A demo in folder `out` on the text at `text`, encoded as `encoding`. `text` None: Python's own documentation."""

    out: Path
    text: str | None
    console: Console
    encoding: str = UTF_8
    _stage: int = field(default=0, init=False)

    def run(self) -> int:
        """Run all stages. Return the exit code: 0, or 75 if training was stopped before its end."""
        inputs = self._gather_text()
        self._train_tokenizer(inputs)
        self._build_corpus(inputs)
        run = self._create_run()
        if self._train(run):
            return 75
        self._evaluate(run)
        self._export(run)
        self._report(run)
        self.print_next_steps()
        return 0

    def print_next_steps(self) -> None:
        """Print commands to try next, as they can be typed on this machine."""
        program = "maskfleet" if shutil.which("maskfleet") else _program_command()
        run, corpus, other = (shell_word(str(self.out / name)) for name in ("run", "corpus", "electra"))
        rows = [
            (f"show {run} --step 100", "a row that was trained on, and what was masked in it"),
            (
                f"init electra-small {other} --corpus {corpus} --tiny",
                "another recipe's small form, on this corpus,",
            ),
            (f"train {other}", "trained the same way"),
        ]
        if self.text is None:
            rows.insert(0, ("demo YOUR_TEXT --out mine", "the same on text of yours: a file, folder or glob"))
        self.console.print("\n[bold]Next[/]", highlight=False)
        width = max(len(words) for words, _ in rows)
        for words, what in rows:
            self._print_line(f"{program} {words:<{width}}   {what}")

    def _gather_text(self) -> list[str]:
        with self._timed_stage("text"):
            self._check_output_folder()
            if self.text is not None:
                files = list_inputs([self.text]).files
                total = human_bytes(sum(file.size for file in files))
                self._print_line(f"yours: {self.text}, {len(files):,} files, {total}")
                return [self.text]
            path = self.out / "text" / "python.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            documents, written = write_documentation(path)
            self._print_line(f"documentation strings of Python's standard library and its help topics, {path}")
            self._print_line(f"{documents:,} documents, {human_bytes(written)}")
            return [str(path)]

    def _check_output_folder(self) -> None:
        """Check that the output folder is writable, before minutes of work."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.out).close()
        except OSError as error:
            raise RunError(
                f"{self.out} cannot be written: {error.strerror}", remedy="give another folder with --out"
            ) from error

    def _build_options(self, inputs: list[str]) -> BuildOptions:
        """Return build options. A .txt file is one document; if one is too long for that, blank lines separate
        documents.
        """
        options = validate_options(BuildOptions, encoding=self.encoding if self.text is not None else UTF_8)
        sizes = (
            file.size * (_COMPRESSION_RATIO if file.compression else 1)
            for file in list_inputs(inputs).files
            if file.format == "txt"
        )
        long = max(sizes, default=0) > options.max_document_bytes
        return options.model_copy(update={"txt_documents": "blank_line" if long else "file"})

    def _train_tokenizer(self, inputs: list[str]) -> None:
        with self._timed_stage(f"tokenizer: byte-level BPE of at most {_VOCABULARY_SIZE:,} ids"):
            uri = str(self.out / "tokenizer")
            texts = sample_texts(inputs, self._build_options(inputs), _TOKENIZER_SAMPLE_BYTES)
            tokenizer = train_tokenizer("byte_bpe", texts, _VOCABULARY_SIZE, allow_fewer_ids=True)
            if (self.out / "tokenizer").exists() and load_tokenizer(uri).hash != tokenizer.hash:
                raise TokenizerError(f"{self.out} holds a demo on other text", remedy="give another folder with --out")
            save_tokenizer(tokenizer, uri)
            self._print_line(f"{uri}: {tokenizer.vocab_size:,} ids (hash {tokenizer.hash[:12]})")

    def _build_corpus(self, inputs: list[str]) -> None:
        with self._timed_stage("corpus: shards with hashes, duplicates dropped, held-out documents apart"):
            fraction = load("quickstart").corpus.heldout.fraction
            options = self._build_options(inputs).model_copy(
                update={"heldout_fraction": fraction, "workers": default_worker_count(inputs)}
            )
            uri = str(self.out / "corpus")
            with show_build_progress(self.console) as report:
                build_corpus(inputs, uri, str(self.out / "tokenizer"), options, report)
            stats = corpus_stats(uri)
            held = f"{stats.heldout.documents:,} documents, {human_count(stats.heldout.tokens)} tokens held out"
            trained = f"{stats.train.documents:,} documents, {human_count(stats.train.tokens)} tokens to train on"
            self._print_line(f"{trained}; {held}")
            if note := heldout_note(stats):
                self._print_line(note)

    def _create_run(self) -> Run:
        with self._timed_stage("run: recipe quickstart, resolved and recorded"):
            uri = str(self.out / "run")
            recipe = load(
                "quickstart",
                (f"corpus.sources.text.uri={self.out / 'corpus'}", f"tokenizer.uri={self.out / 'tokenizer'}"),
            )
            now = datetime.now(UTC)
            if (self.out / "run" / RECORD_FILE).exists():
                return reconcile(open_run(uri), recipe=recipe, accept_changes=False, now=now)
            return create_run(recipe, uri, now)

    def _train(self, run: Run) -> bool:
        """Train the run. Return whether training was stopped before its end."""
        ranks, stage = run.recipe.trainers, run.recipe.zero
        with self._timed_stage(f"training: {ranks} ranks, ZeRO {stage}, data through Ray"):
            outcome = train(run, self.console, TRAINING_COMPANIONS)
            if outcome.code:
                self._print_line(f"stopped at step {outcome.step:,}; run the same command to continue")
            return outcome.code != 0

    def _evaluate(self, run: Run) -> None:
        with self._timed_stage("evaluation on held-out documents"):
            evaluations = read_history(run.store).evaluations
            if not evaluations or (loss := token_loss(evaluations[-1])) is None:
                raise RunError(
                    f"{run.uri} has no evaluation with a finite loss", remedy="remove the folder and start again"
                )
            last, counted = evaluations[-1], load_or_compute_baselines(run)
            self._print_line(f"masked tokens evaluated        {counted.targets:,}")
            self._print_line(f"unigram cross-entropy          {counted.unigram:.3f} nats (guessing by frequency)")
            self._print_line(
                f"left-bigram cross-entropy      {counted.bigram:.3f} nats (guessing from the token before)"
            )
            self._print_line(f"held-out loss of the model     {loss:.3f} nats, perplexity {last['perplexity']:.1f}")
            below, bigram = counted.unigram - loss, counted.bigram - loss
            self._print_line(f"the model is {below:+.3f} nats better than unigram, {bigram:+.3f} than left-bigram")

    def _export(self, run: Run) -> None:
        with self._timed_stage("export, and masked sentences filled by the exported model"):
            folder = self.out / "model"
            step = export_run(run, None, str(folder)).step
            self._print_line(f"step {step:,} to {folder}; transformers loads it: AutoModelForMaskedLM, AutoTokenizer")
            filler = MaskFiller(folder)
            for sentence in _EXAMPLE_SENTENCES if self.text is None else self._own_sentences(filler.max_tokens):
                guesses = filler.top_candidates(sentence, 4)
                shown = ", ".join(f"{guess.text.strip()!r} {guess.probability:.0%}" for guess in guesses)
                self._print_line(f"{one_line(sentence)}\n        {shown}")

    def _own_sentences(self, max_tokens: int) -> Iterator[str]:
        """Yield held-out sentences of the user's text with one token masked, cut to fit into `max_tokens`. A tokenizer
        trained on other text may spell the English examples letter by letter."""
        corpus = open_corpus(str(self.out / "corpus"))
        tokenizer, block = corpus.tokenizer(), read_block(corpus.store, corpus.table("heldout"), 0)
        for start in block.sentences[:-1][: len(_EXAMPLE_SENTENCES)].tolist():
            tokens = block.tokens[start : start + max_tokens // 3]  # a character cut in two may encode to more tokens
            masked = len(tokens) // 2
            parts = (tokenizer.decode(part) for part in (tokens[:masked], tokens[masked + 1 :]))
            before, after = (part.replace(MASK[:-1], "") for part in parts)  # removes masks that the text contains
            yield f"{before} {MASK}{after}"

    def _report(self, run: Run) -> None:
        with self._timed_stage("report"):
            page = self.out / "report.html"
            write_report(run, page, with_baselines=True, now=datetime.now(UTC))
            self._print_line(f"open {page} in a browser")

    @contextmanager
    def _timed_stage(self, title: str) -> Iterator[None]:
        self._stage += 1
        self.console.print(f"\n[bold]\\[{self._stage}/{_STAGE_COUNT}][/] {title}", highlight=False)
        started = time.monotonic()
        yield
        self._print_line(f"took {human_duration(time.monotonic() - started)}")

    def _print_line(self, text: str) -> None:
        self.console.print(f"      {text}", highlight=False, markup=False, soft_wrap=True)


def _program_command() -> str:
    """Return the command that started this program, for machines without `maskfleet` on the path."""
    called = Path(sys.argv[0])
    return f"{sys.executable} -m maskfleet" if called.name == "__main__.py" else os.path.relpath(called)
