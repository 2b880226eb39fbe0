"""Finds the steps of a run, past or future, that train on a document. They are computed from the recipe and the
positions.

Steps that a run took before it went back from a loss spike are listed, too, with the attempt that went back: the run's
weights do not contain them, but their data were read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table

from checkpoints.gather import Alone
from checkpoints.listing import Rewind
from checkpoints.load import newest_good
from data_service.corpus.corpus import open_corpus, place_document
from data_service.printable import visible
from data_service.stream.exposure import TextPlace
from data_service.stream.positions import Positions, Range
from data_service.stream.stream import Stream
from launcher.errors import RunError
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import read_lost, sample_positions, stream_spec


@dataclass(frozen=True)
class DocumentName:
    """Document number `number` of the training split of source `source`, as `maskfleet corpus show --index` counts."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}:{self.number}"


@dataclass(frozen=True)
class Exposure:
    """A row that holds tokens of a document.

    Attributes:
        document: the document.
        step, row: the row's place in the run, both counted from 0.
        phase, epoch, sample: position of the row in the run's data.
        undone: attempt that went back from the step, so that the run's weights lack it; None if none did.
    """

    document: DocumentName
    step: int
    row: int
    phase: int
    epoch: int
    sample: int
    undone: int | None = None


@dataclass(frozen=True)
class ExposureReport:
    """All exposures of a run to documents.

    Attributes:
        documents: documents that were asked for.
        found: exposures, by step and row.
        trained: number of steps in the newest good checkpoint. Later steps are still to come, or to be done again.
        begins: first step that takes the run's own data. Earlier steps were taken by the run in `forked_from`.
        forked_from: run that this one was forked from; None if it was not forked.
    """

    documents: tuple[DocumentName, ...]
    found: tuple[Exposure, ...]
    trained: int
    begins: int
    forked_from: str | None


def find_exposures(run: Run, documents: Sequence[DocumentName]) -> ExposureReport:
    """Return the rows of a run that hold tokens of training documents.

    Raises:
        RunError: the run has no such source.
        CorpusError: the source has no such document, or the corpora cannot be read.
        StoreError: a store cannot be read.
    """
    opened = {name: open_corpus(uri) for name, uri in _sources(run, documents).items()}
    numbers = list(run.recipe.corpus.sources)
    places = {
        TextPlace(
            numbers.index(document.source), *place_document(opened[document.source], "train", document.number)
        ): document
        for document in documents
    }
    tokenizer, cache = run.tokenizer(), run.store.at("cache")
    streams = [
        Stream(stream_spec(run, tokenizer, phase), cache=cache) for phase in range(len(run.recipe.phases))
    ]
    good = newest_good(run.store, Alone(), full=False)
    lost = read_lost(run, good.manifest if good else None, Alone())
    found = [
        *_of(streams, sample_positions(run, streams, lost.ranges), places),
        *_undone(run, streams, lost.gone_back, places),
    ]
    return ExposureReport(
        documents=tuple(documents),
        found=tuple(
            sorted(found, key=lambda each: (each.step, each.row, each.undone or 0, str(each.document)))
        ),
        trained=good.manifest.step if good else 0,
        begins=run.record.data_begins,
        forked_from=run.record.origins[-1].run if run.record.origins else None,
    )


def _sources(run: Run, documents: Sequence[DocumentName]) -> dict[str, str]:
    """Return the URI of each source that a document is of. Raises RunError: the run has no such source."""
    names = run.recipe.corpus.sources
    for document in documents:
        if document.source not in names:
            raise RunError(
                f"{run.uri} has no source {document.source}", remedy=f"its sources are {', '.join(names)}"
            )
    return {document.source: names[document.source].uri for document in documents}


def _of(
    streams: Sequence[Stream], positions: Positions, places: dict[TextPlace, DocumentName]
) -> Iterator[Exposure]:
    for phase, stream in enumerate(streams):
        for place, epoch, sample in stream.find(list(places), positions.epochs(phase)):
            taken = positions.step_of(phase, epoch, sample)
            if taken is not None:
                yield Exposure(places[place], *taken, phase, epoch, sample)


def _undone(
    run: Run,
    streams: Sequence[Stream],
    gone_back: Sequence[Rewind],
    places: dict[TextPlace, DocumentName],
) -> Iterator[Exposure]:
    """Yield the exposures of steps that were taken before a rewind: with the data that were skipped then."""
    for rewind in gone_back:
        returned = rewind.to.step if rewind.to else run.record.data_begins
        for each in _of(streams, _positions_before(run, streams, rewind, returned), places):
            if returned <= each.step < rewind.reached:
                yield replace(each, undone=rewind.attempt)


def _positions_before(run: Run, streams: Sequence[Stream], rewind: Rewind, returned: int) -> Positions:
    """Return the positions by which the run took data up to a rewind.

    A rewind's record lists what was skipped before, and then the data of the undone steps. So the number of ranges that
    were skipped before is the one with which these steps take the rest of the list.
    """
    spans = [Range(*span) for span in rewind.skips]
    for known in range(len(spans) + 1):
        positions = sample_positions(run, streams, spans[:known])
        if list(positions.joined(returned, rewind.reached)) == spans[known:]:
            return positions
    raise RunError(
        f"{run.uri}: what the rewind of attempt {rewind.attempt} skips are not the data of steps "
        f"{returned} to {rewind.reached}",
        remedy="restore the record of the rewind from a copy of the run",
    )


def table(report: ExposureReport) -> Table:
    """Return a table with a row for each exposure."""
    shown = Table("document", "step", "row", "phase", "epoch", "sample", "state", box=None)
    for each in report.found:
        if each.undone is not None:
            state = f"undone by attempt {each.undone}"
        else:
            state = "trained" if each.step < report.trained else "to come"
        figures = (each.step, each.row, each.phase, each.epoch, each.sample)
        shown.add_row(escape(visible(str(each.document))), *(f"{figure:,}" for figure in figures), state)
    return shown


def summary(report: ExposureReport) -> Iterator[str]:
    """Yield lines: how many rows hold each document, and what the report cannot know."""
    for document in report.documents:
        mine = [each for each in report.found if each.document == document]
        kept = [each for each in mine if each.undone is None]
        trained = sum(each.step < report.trained for each in kept)
        undone = f", {len(mine) - len(kept)} undone" if len(mine) > len(kept) else ""
        yield visible(f"{document}: {trained} rows trained, {len(kept) - trained} to come{undone}")
    if report.begins:
        yield visible(
            f"steps before {report.begins:,} read other data: ask {report.forked_from}, from which this run was forked"
        )
