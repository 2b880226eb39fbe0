"""`maskfleet runs exposure`: the rows that it names are those that a look at every row of every step finds."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind, Span, record
from data_service.corpus.corpus import open_corpus, place_document
from data_service.errors import CorpusError
from data_service.stream.positions import Positions, Range
from data_service.stream.stream import Stream
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.observe.inspect.exposure import DocumentName, Exposure, find_exposures
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import sample_positions, stream_spec
from tests.support.checks.command import maskfleet
from tests.support.runs.small_runs import new_run


@pytest.fixture
def run(fresh_run: str) -> Run:
    return open_run(fresh_run)


def streams_of(run: Run) -> list[Stream]:
    tokenizer = run.tokenizer()
    return [Stream(stream_spec(run, tokenizer, phase)) for phase in range(len(run.recipe.phases))]


def documents_of(run: Run, count: int, seed: int) -> list[DocumentName]:
    corpus = open_corpus(run.recipe.corpus.sources["text"].uri)
    total = int(corpus.table("train").documents.sum())
    return [DocumentName("text", number) for number in random.Random(seed).sample(range(total), count)]


def scanned(
    run: Run, document: DocumentName, positions: Positions, steps: range, undone: int | None = None
) -> Iterator[Exposure]:
    """What holds the document, by looking at every row of `steps`."""
    corpus = open_corpus(run.recipe.corpus.sources["text"].uri)
    block, start, stop = place_document(corpus, "train", document.number)
    streams = streams_of(run)
    for step in steps:
        row = 0
        for span in positions.ranges(step):
            for sample in range(span.start, span.stop):
                text = streams[span.phase].source(span.epoch, sample)
                if text.block == block and any(
                    part.start < stop and start < part.stop for part in text.stretches
                ):
                    yield Exposure(document, step, row, span.phase, span.epoch, sample, undone)
                row += 1


def _rewind(attempt: Attempt, returned: int, reached: int, spans: tuple[Span, ...]) -> Rewind:
    return Rewind(
        attempt=attempt.number,
        to=CheckpointName(attempt.number, returned),
        began=returned,
        reached=reached,
        cause="a spike",
        skips=spans,
    )


@pytest.mark.parametrize("packing", ["full_sentences", "segment_pair"])
def test_every_row_that_holds_a_document(inputs: Path, tmp_path: Path, packing: str) -> None:
    run = open_run(new_run(inputs, str(tmp_path / "run"), f"input={{packing: {packing}}}"))
    documents = documents_of(run, 3, seed=len(packing))
    report = find_exposures(run, documents)
    positions = sample_positions(run, streams_of(run), ())
    everything = range(run.recipe.total_steps)
    for document in documents:
        expected = set(scanned(run, document, positions, everything))
        assert expected, "steps enough for an epoch"
        assert {each for each in report.found if each.document == document} == expected
    assert len(report.found) == len(set(report.found))
    assert report.trained == 0


def test_rows_of_steps_that_a_run_went_back_from(run: Run) -> None:
    """Twice, and each time past the data of the undone steps, of one phase and of two."""
    streams, skipped, undone = streams_of(run), tuple[Range, ...](), []
    for number, (returned, reached) in enumerate([(3, 6), (2, 10)], start=1):
        positions = sample_positions(run, streams, skipped)
        undone.append((number, positions, range(returned, reached)))
        skipped = (*skipped, *positions.joined(returned, reached))
        attempt = claim(run.store, owner=Owner.here(0.0))
        spans = tuple((span.phase, span.epoch, span.start, span.stop) for span in skipped)
        record(run.store, _rewind(attempt, returned, reached, spans), attempt)
    (document,) = documents_of(run, 1, seed=4)
    expected = set(
        scanned(run, document, sample_positions(run, streams, skipped), range(run.recipe.total_steps))
    )
    for number, positions, steps in undone:
        expected |= set(scanned(run, document, positions, steps, undone=number))
    assert {each.undone for each in expected} > {None}
    assert set(find_exposures(run, [document]).found) == expected


def test_a_record_of_a_rewind_that_is_not_of_this_data(run: Run) -> None:
    attempt = claim(run.store, owner=Owner.here(0.0))
    record(run.store, _rewind(attempt, 3, 6, ((0, 0, 1, 2),)), attempt)
    with pytest.raises(RunError, match=rf"\battempt {attempt.number}\b.*\b3 to 6\b"):
        find_exposures(run, documents_of(run, 1, seed=1))


def test_what_is_not_there(run: Run) -> None:
    with pytest.raises(RunError, match=r"\bnews\b") as caught:
        find_exposures(run, [DocumentName("news", 3)])
    assert "text" in caught.value.remedy
    with pytest.raises(CorpusError, match=r"\b987654\b"):
        find_exposures(run, [DocumentName("text", 987654)])


def test_the_command(run: Run) -> None:
    (document,) = documents_of(run, 1, seed=7)
    found = find_exposures(run, [document]).found
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
