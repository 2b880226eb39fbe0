"""Finds the steps of a run, past or future, that train on a document. The steps are computed from the recipe and the
sample positions.

Steps that a run took before it went back from a loss spike are listed, too, with the attempt that went back: the run's
weights do not contain them, but their data were read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from rich.markup import escape
from rich.table import Table

from checkpoints.gather import SingleRank
from checkpoints.listing import Rewind
from checkpoints.verify import find_newest_good
from data_service.printable import escape_controls
from data_service.stream.exposure import TokenRange
from data_service.stream.positions import SampleRange, StepSampleRanges
from data_service.stream.stream import Stream
from launcher.errors import RunError
from launcher.observe.inspect.document_selection import DocumentName, DocumentSelection, RemovedDocumentSteps
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import read_skipped_data, sample_positions, stream_spec

_DOCUMENTS_PER_PASS = 1 << 16  # documents that one pass over the epochs looks for


@dataclass(frozen=True)
class DocumentExposure:
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
        selection: the documents whose rows were looked for.
        found: exposures, by step and row.
        left_out: number of rows, by document, that left the document out because it had been removed.
        trained: number of steps in the newest good checkpoint. Later steps are still to come, or to be done again.
        begins: first step that takes the run's own data. Earlier steps were taken by the run in `forked_from`.
        forked_from: run that this one was forked from; None if it was not forked.
    """

    selection: DocumentSelection
    found: tuple[DocumentExposure, ...]
    left_out: Counter[DocumentName]
    trained: int
    begins: int
    forked_from: str | None


def find_exposures(
    run: Run, selection: DocumentSelection, report: Callable[[int], None] = lambda done: None
) -> ExposureReport:
    """Return the rows of a run that hold tokens of training documents.

    `report` is called with the number of documents just looked for in one phase.

    Raises:
        CorpusError: the corpora cannot be read.
        RunError, CheckpointError: the run's records do not fit its data.
        StoreError: a store cannot be read.
    """
    tokenizer, cache = run.tokenizer(), run.store.with_prefix("cache")
    streams = [Stream(stream_spec(run, tokenizer, phase), cache=cache) for phase in range(len(run.recipe.phases))]
    good = find_newest_good(run.store, SingleRank(), full=False)
    lost = read_skipped_data(run, good.manifest if good else None, SingleRank())
    finder = _ExposureFinder(streams, {place: name for name, place in selection.places.items()}, report)
    gone = RemovedDocumentSteps(run, selection)
    found, left_out = list[DocumentExposure](), Counter[DocumentName]()
    committed = finder.exposures(sample_positions(run, streams, lost.ranges))
    for each in chain(committed, _exposures_before_rewinds(run, streams, lost.gone_back, finder)):
        if gone.is_left_out(each.document, each.phase, each.step, each.undone):
            left_out[each.document] += 1
        else:
            found.append(each)
    return ExposureReport(
        selection=selection,
        found=tuple(sorted(found, key=lambda each: (each.step, each.row, each.undone or 0, each.document))),
        left_out=left_out,
        trained=good.manifest.step if good else 0,
        begins=run.record.data_begins,
        forked_from=run.record.origins[-1].run if run.record.origins else None,
    )


class _ExposureFinder:
    """Finds the rows of documents. `report`: as for `find_exposures`."""

    def __init__(
        self,
        streams: Sequence[Stream],
        documents: Mapping[TokenRange, DocumentName],
        report: Callable[[int], None],
    ) -> None:
        self._streams, self._documents, self._report = streams, documents, report
        self._places = sorted(documents)

    def exposures(self, positions: StepSampleRanges) -> Iterator[DocumentExposure]:
        """Yield the exposures of a run whose steps read the samples at `positions`."""
        for phase, stream in enumerate(self._streams):
            epochs = positions.epochs_of_phase(phase)
            for first in range(0, len(self._places), _DOCUMENTS_PER_PASS):
                part = self._places[first : first + _DOCUMENTS_PER_PASS]
                for place, epoch, sample in stream.find(part, epochs):
                    taken = positions.find_step(phase, epoch, sample)
                    if taken is not None:
                        yield DocumentExposure(self._documents[place], *taken, phase, epoch, sample)
                self._report(len(part))


def _exposures_before_rewinds(
    run: Run, streams: Sequence[Stream], rewinds: Sequence[Rewind], finder: _ExposureFinder
) -> Iterator[DocumentExposure]:
    """Yield the exposures of steps that a rewind undid, computed with the data ranges skipped before that rewind."""
    for rewind in rewinds:
        returned = rewind.to.step if rewind.to else run.record.data_begins
        for each in finder.exposures(_positions_before_rewind(run, streams, rewind, returned)):
            if returned <= each.step < rewind.reached:
                yield replace(each, undone=rewind.attempt)


def _positions_before_rewind(
    run: Run, streams: Sequence[Stream], rewind: Rewind, returned_step: int
) -> StepSampleRanges:
    """Return the sample positions that the run used until a rewind.

    The record of a rewind lists data ranges: first those that the run skipped already before it, then those that the
    undone steps had read. It does not say where the second part begins, so every place is tried. At the right place,
    the undone steps of a run that skips the first part read exactly the second part.
    """
    spans = [SampleRange(*span) for span in rewind.skips]
    for known in range(len(spans) + 1):
        positions = sample_positions(run, streams, spans[:known])
        if list(positions.ranges_of_steps(returned_step, rewind.reached)) == spans[known:]:
            return positions
    raise RunError(
        f"{run.uri}: the ranges that the rewind of attempt {rewind.attempt} skips are not the data of steps "
        f"{returned_step} to {rewind.reached}",
        remedy="restore the record of the rewind from a copy of the run",
    )


def exposure_table(report: ExposureReport) -> Table:
    """Return a table with a row for each exposure."""
    shown = Table("document", "step", "row", "phase", "epoch", "sample", "state", box=None)
    for each in report.found:
        if each.undone is not None:
            state = f"undone by attempt {each.undone}"
        else:
            state = "trained" if each.step < report.trained else "to come"
        figures = (each.step, each.row, each.phase, each.epoch, each.sample)
        shown.add_row(escape(escape_controls(str(each.document))), *(f"{figure:,}" for figure in figures), state)
    return shown


def summary_lines(report: ExposureReport) -> Iterator[str]:
    """Yield lines with the number of rows that hold each document, and with steps that the report does not cover."""
    trained, coming, undone = Counter[DocumentName](), Counter[DocumentName](), Counter[DocumentName]()
    for each in report.found:
        counted = trained if each.step < report.trained else coming
        (counted if each.undone is None else undone)[each.document] += 1
    for document in report.selection.places:
        also = f", {undone[document]} undone" if undone[document] else ""
        if left_out := report.left_out[document]:
            also += f", {left_out} without it, as it was removed"
        name = report.selection.describe(document)
        yield escape_controls(f"{name}: {trained[document]} rows trained, {coming[document]} to come{also}")
    for name in report.selection.heldout:
        yield escape_controls(f"{name}: held out, so no step trains on it; evaluations read it until it is removed")
    if not report.selection.places and not report.selection.heldout:
        yield "no document was named"
    if report.begins:
        yield escape_controls(
            f"steps before {report.begins:,} are not covered: use {report.forked_from}, from which this run was forked"
        )
