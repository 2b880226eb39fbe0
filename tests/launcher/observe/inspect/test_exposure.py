"""`maskfleet runs exposure`: the rows that it names are those that a look at every row of every step finds."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind, SampleSpan, record_rewind
from data_service.corpus.corpus import locate_document_tokens, open_corpus
from data_service.corpus.remove import documents_by_number as documents_by_number_in
from data_service.corpus.remove import remove_documents
from data_service.errors import CorpusError
from data_service.stream.positions import SampleRange, StepSampleRanges
from data_service.stream.stream import Stream
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.observe.inspect.document_selection import (
    DocumentName,
    documents_by_id,
    documents_by_number,
    removed_documents,
)
from launcher.observe.inspect.exposure import DocumentExposure, ExposureReport, find_exposures
from launcher.runtime.rank.resume import agree_on_removals
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import sample_positions, stream_spec
from tests.support.checks.command import maskfleet
from tests.support.data.made_up import write_text
from tests.support.runs.small_runs import SETTINGS, new_run, reconciled


@pytest.fixture
def run(fresh_run: str) -> Run:
    return open_run(fresh_run)


def exposures(run: Run, documents: list[DocumentName]) -> ExposureReport:
    return find_exposures(run, documents_by_number(run, documents))


def streams_of(run: Run) -> list[Stream]:
    tokenizer = run.tokenizer()
    return [Stream(stream_spec(run, tokenizer, phase)) for phase in range(len(run.recipe.phases))]


def documents_of(run: Run, count: int, seed: int) -> list[DocumentName]:
    corpus = open_corpus(run.recipe.corpus.sources["text"].uri)
    total = int(corpus.table("train").documents.sum())
    return [DocumentName("text", number) for number in random.Random(seed).sample(range(total), count)]


def scanned(
    run: Run, document: DocumentName, positions: StepSampleRanges, steps: range, undone: int | None = None
) -> Iterator[DocumentExposure]:
    """What holds the document, by looking at every row of `steps`."""
    corpus = open_corpus(run.recipe.corpus.sources["text"].uri)
    block, start, stop = locate_document_tokens(corpus, "train", document.number)
    streams = streams_of(run)
    for step in steps:
        row = 0
        for span in positions.ranges_of_step(step):
            for sample in range(span.start, span.stop):
                text = streams[span.phase].sample_text(span.epoch, sample)
                if text.block == block and any(part.start < stop and start < part.stop for part in text.stretches):
                    yield DocumentExposure(document, step, row, span.phase, span.epoch, sample, undone)
                row += 1


def _rewind(attempt: Attempt, returned: int, reached: int, spans: tuple[SampleSpan, ...]) -> Rewind:
    return Rewind(
        attempt=attempt.number,
        to=CheckpointName(attempt.number, returned),
        began=returned,
        reached=reached,
        cause="a spike",
        skips=spans,
    )


@pytest.mark.long
@pytest.mark.parametrize("packing", ["full_sentences", "segment_pair"])
def test_every_row_that_holds_a_document(inputs: Path, tmp_path: Path, packing: str) -> None:
    run = open_run(new_run(inputs, str(tmp_path / "run"), f"input={{packing: {packing}}}"))
    documents = documents_of(run, 3, seed=len(packing))
    report = exposures(run, documents)
    positions = sample_positions(run, streams_of(run), ())
    everything = range(run.recipe.total_steps)
    for document in documents:
        expected = set(scanned(run, document, positions, everything))
        assert expected, "steps enough for an epoch"
        assert {each for each in report.found if each.document == document} == expected
    assert len(report.found) == len(set(report.found))
    assert report.trained == 0


@pytest.mark.long
def test_rows_of_steps_that_a_run_went_back_from(run: Run) -> None:
    """Twice, and each time past the data of the undone steps, of one phase and of two."""
    streams, skipped, undone = streams_of(run), tuple[SampleRange, ...](), []
    for number, (returned, reached) in enumerate([(3, 6), (2, 10)], start=1):
        positions = sample_positions(run, streams, skipped)
        undone.append((number, positions, range(returned, reached)))
        skipped = (*skipped, *positions.ranges_of_steps(returned, reached))
        attempt = claim(run.store, owner=Owner.for_this_process(0.0))
        spans = tuple((span.phase, span.epoch, span.start, span.stop) for span in skipped)
        record_rewind(run.store, _rewind(attempt, returned, reached, spans), attempt)
    (document,) = documents_of(run, 1, seed=4)
    expected = set(scanned(run, document, sample_positions(run, streams, skipped), range(run.recipe.total_steps)))
    for number, positions, steps in undone:
        expected |= set(scanned(run, document, positions, steps, undone=number))
    assert {each.undone for each in expected} > {None}
    assert set(exposures(run, [document]).found) == expected


def test_a_record_of_a_rewind_that_is_not_of_this_data(run: Run) -> None:
    attempt = claim(run.store, owner=Owner.for_this_process(0.0))
    record_rewind(run.store, _rewind(attempt, 3, 6, ((0, 0, 1, 2),)), attempt)
    with pytest.raises(RunError, match=rf"\battempt {attempt.number}\b.*\b3 to 6\b"):
        exposures(run, documents_of(run, 1, seed=1))


def test_what_is_not_there(run: Run) -> None:
    with pytest.raises(RunError, match=r"\bnews\b") as caught:
        exposures(run, [DocumentName("news", 3)])
    assert "text" in caught.value.remedy
    with pytest.raises(CorpusError, match=r"\b987654\b"):
        exposures(run, [DocumentName("text", 987654)])


@pytest.mark.long
def test_the_command(run: Run) -> None:
    (document,) = documents_of(run, 1, seed=7)
    found = exposures(run, [document]).found
    asked = ("runs", "exposure", run.uri, "--document", document)
    lines = [json.loads(line) for line in maskfleet(*asked, "--json").splitlines()]
    assert [(line["step"], line["row"]) for line in lines] == [(each.step, each.row) for each in found]
    shown = maskfleet(*asked).splitlines()
    assert len(shown) == 1 + len(found) + 1
    assert f"0 rows trained, {len(found)} to come" in shown[-1]


@pytest.mark.parametrize("name", ["text", ":3", "text:", "text:-1", "text:x"])
def test_a_document_that_is_no_name(run: Run, name: str) -> None:
    result = CliRunner().invoke(app, ["runs", "exposure", run.uri, "--document", name])
    assert result.exit_code == 2
    assert "SOURCE:NUMBER" in result.output


def _accept(run: Run, step: int) -> Run:
    """The run after a start that resumed at `step` without what is removed by now."""
    told = reconciled(
        open_run(run.uri),
        recipe=None,
        accept_changes=False,
        now=datetime(2026, 5, 1, tzinfo=UTC),
        without_removed=True,
    )
    agree_on_removals(told, claim(run.store, owner=Owner.for_this_process(0.0)), step, SingleRank())
    return open_run(run.uri)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_documents_that_are_removed_on_the_way(inputs: Path, tmp_path: Path, seed: int) -> None:
    """Before the run, and at two of its steps; once it went back behind the second."""
    draw = random.Random(seed)
    shutil.copytree(inputs, tmp_path / "inputs")
    corpus = open_corpus(str(tmp_path / "inputs/corpus"))
    count = int(corpus.table("train").documents.sum())
    gone = [draw.sample(range(count), draw.randint(1, 3)) for _ in range(3)]

    def remove(numbers: list[int]) -> None:
        found = documents_by_number_in(corpus, list(map(str, numbers)))
        remove_documents(corpus, found, removed_by="x", removed_at=1, reason="asked for")

    remove(gone[0])
    run = open_run(new_run(tmp_path / "inputs", "run"))
    first, second = sorted(draw.sample(range(run.recipe.total_steps), 2))
    steps = {first: gone[1], second: gone[2]}
    for step, numbers in steps.items():
        remove(numbers)
        run = _accept(run, step)
    if draw.random() < 0.5:
        back = draw.randrange(first, second)
        run, steps = _accept(run, back), {first: gone[1], back: gone[1] + gone[2]}
    report = find_exposures(run, removed_documents(run))
    positions = sample_positions(run, streams_of(run), ())
    expected, left_out = set[DocumentExposure](), 0
    for number in {number for numbers in gone for number in numbers}:
        document = DocumentName("text", number)
        for each in scanned(run, document, positions, range(run.recipe.total_steps)):
            before = [known for step, known in steps.items() if step <= each.step]
            if number in gone[0] or any(number in known for known in before):
                left_out += 1
            else:
                expected.add(each)
    assert set(report.found) == expected
    assert sum(report.left_out.values()) == left_out
    assert len(report.selection.places) == len({number for numbers in gone for number in numbers})


@pytest.mark.long
def test_ids_are_found_in_all_sources_and_held_out_ones_are_said(tmp_path: Path) -> None:
    write_text(tmp_path / "lines.txt", 200)
    lines = (tmp_path / "lines.txt").read_text("utf-8").splitlines()
    (tmp_path / "p.yaml").write_text("id: name\n")
    maskfleet("tokenizer", "train", tmp_path / "lines.txt", "--vocab-size", "320", "--out", tmp_path / "t")
    for source, first in (("a", 0), ("b", 20)):  # both have d20 to d29
        records = [{"name": f"d{n}", "text": " ".join(lines[3 * n : 3 * n + 3])} for n in range(first, first + 30)]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        command = (
            "corpus",
            "build",
            tmp_path / f"{source}.jsonl",
            "--tokenizer",
            tmp_path / "t",
            "--workers",
            "1",
        )
        options = ("--heldout", "0.2", "--provenance", tmp_path / "p.yaml", "--out", tmp_path / source)
        maskfleet(*command, *options)
    given = [part for setting in SETTINGS for part in ("--set", setting) if "heldout" not in setting]
    corpora = ("--corpus", f"a={tmp_path / 'a'}", "--corpus", f"b={tmp_path / 'b'}")
    maskfleet("init", "quickstart", tmp_path / "run", *corpora, *given)
    run = open_run(str(tmp_path / "run"))
    ids = [f"d{number}" for number in range(50)]
    asked = documents_by_id(run, ids)
    assert sorted([*asked.ids.values(), *(re.findall(r"id (d\d+)", name)[0] for name in asked.heldout)]) == sorted(
        [*ids, *(f"d{number}" for number in range(20, 30))]
    )
    assert asked.heldout
    by_number = documents_by_number(run, list(asked.places))
    assert by_number.places == asked.places
    listed = tmp_path / "ids.txt"
    listed.write_text("d3\nd25\n")
    shown = maskfleet("runs", "exposure", run.uri, "--ids", listed)
    assert "id d3" in shown
    assert shown.count("id d25") == 2
    with pytest.raises(CorpusError) as caught:
        documents_by_id(run, ["d3", "d77"])
    assert "d77" in caught.value.problem
    assert "d3'" not in caught.value.problem
    assert "--removed" in str(CliRunner().invoke(app, ["runs", "exposure", run.uri]).exception)
