"""Shows a row of any step of a run, past or future: text, masks, targets, and its place in the corpus.

The row is computed from the recipe and the position alone, by the definition of the stream, so it is what training
sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.text import Text

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import PairTexts
from data_service.corpus.removals import load_removals_up_to
from data_service.printable import escape_controls
from data_service.samples.pairs import OrderedPairs, Translations
from data_service.samples.samples import Samples
from data_service.samples.spec import Input
from data_service.samples.texts import TextPairs
from data_service.stream.positions import SampleRange
from data_service.stream.stream import SampleText, Stream
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RunError
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import current_skipped_ranges, sample_positions, stream_spec

if TYPE_CHECKING:
    from data_service.corpus.sidecar import DocumentOrigin


@dataclass(frozen=True)
class Shown:
    """One row of one step, and the text that it was made from.

    Attributes:
        step, row: numbers of the step and of the row in it, from 0.
        rows: number of rows in the step.
        phase, epoch, sample: position of the row in the run's data.
        input: settings by which the phase's rows are made.
        source: text of the row and its place in the corpus.
        samples: the row alone, as training receives it.
        tokenizer: tokenizer that decodes the row.
        documents: documents of the row, if the corpus says where they come from.
        left_out: token offsets, in the corpus's block, of documents that the step left out because they were removed.
    """

    step: int
    row: int
    rows: int
    phase: int
    epoch: int
    sample: int
    input: Input
    source: SampleText
    samples: Samples
    tokenizer: Tokenizer
    documents: tuple["DocumentOrigin", ...] = ()
    left_out: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """Return the text that `maskfleet show` prints, without colours."""
        return "\n".join(Text.from_markup(line).plain for line in render_lines(self))


def find_sample(run: Run, step: int, row: int) -> Shown:
    """Return row `row` of step `step` of `run`.

    Raises:
        RunError: the run has no such step, or no data for it, or the step has no such row.
        CorpusError, StoreError: the corpora cannot be read.
    """
    if not 0 <= step < run.recipe.total_steps:
        raise RunError(f"{run.uri} has no step {step}", remedy=f"its steps are 0 to {run.recipe.total_steps - 1}")
    if step < run.record.data_begins:
        raise RunError(
            f"{run.uri} has no data for step {step}: the run's own data begins at step {run.record.data_begins}",
            remedy=f"give the run that it was forked from: {run.record.origins[-1].run}",
        )
    tokenizer = run.tokenizer()
    cache = run.store.with_prefix("cache")
    as_read = replace(run, wanted=run.removal_history.states_at(step))  # without the documents removed by then
    specs = [stream_spec(as_read, tokenizer, phase) for phase in range(len(run.recipe.phases))]
    streams = [Stream(spec, cache=cache) for spec in specs]
    ranges = sample_positions(run, streams, current_skipped_ranges(run)).ranges_of_step(step)
    place, rows = _sample_position(ranges, row), sum(span.stop - span.start for span in ranges)
    if row < 0 or place is None:
        raise RunError(f"step {step} has no row {row}", remedy=f"its rows are 0 to {rows - 1}")
    phase, epoch, sample = place
    samples = streams[phase].read(epoch, sample, sample + 1)
    source = streams[phase].sample_text(epoch, sample)
    return Shown(
        step,
        row,
        rows,
        phase,
        epoch,
        sample,
        specs[phase].input,
        source,
        samples,
        tokenizer,
        documents=_row_documents(source),
        left_out=_removed_document_starts(source, as_read.removals.get(source.name, "")),
    )


def _row_documents(source: SampleText) -> tuple["DocumentOrigin", ...]:
    """Return the documents of a row, from its corpus's sidecar files; none if it was built without provenance."""
    corpus = open_corpus(source.uri)
    if not corpus.manifest.provenance:
        return ()
    from data_service.corpus.sidecar import origins_in_ranges  # pyarrow is imported only for corpora that need it

    return tuple(origins_in_ranges(corpus, "train", source.block, source.stretches))


def _removed_document_starts(source: SampleText, removal_digest: str) -> frozenset[int]:
    """Return the token offsets at which the removed documents of a row's block begin. `removal_digest`: digest of the
    last removal."""
    if not removal_digest:
        return frozenset()
    corpus = open_corpus(source.uri)
    removed = load_removals_up_to(corpus.store, corpus.manifest, removal_digest).removed_documents("train")
    return frozenset(removed.token_ranges(source.block)[:, 0].tolist())


def render_lines(shown: Shown) -> Iterator[str]:
    """Yield lines in rich's markup: the position, the text with its targets marked, then a line for each target. An
    example of several texts has a line for each text instead."""
    source = shown.source
    yield (
        f"[bold]step {shown.step}, row {shown.row}[/] of {shown.rows}: "
        f"phase {shown.phase}, epoch {shown.epoch}, sample {shown.sample}"
    )
    languages = f", {' and '.join(map(escape_controls, source.languages))}" if source.languages else ""
    yield (
        f"from {escape(escape_controls(source.name))} ({escape(escape_controls(source.uri))}{escape(languages)}): "
        f"block {source.block}, row {source.row}, {_text_location(source)}, read {source.epoch} time(s) before"
    )
    for document in shown.documents:
        gone = ", removed" if document.start in shown.left_out else ""
        yield f"document {document.document}: {escape(escape_controls(document.provenance.description))}{gone}"
    samples = shown.samples
    if samples.holes is not None and len(samples.holes):
        yield f"nothing is learned at {len(samples.holes)} tokens: they stand in place of removed documents"
    if samples.text_starts is not None:
        yield from _example_text_lines(shown)
        return
    if samples.corrupted is not None:
        yield f"{len(samples.tokens)} tokens, all predicted from those before and from {len(samples.corrupted)}:"
        yield ""
        yield f"[bold]read[/] {escape(escape_controls(shown.tokenizer.decode(samples.corrupted)))}"
        yield f"[bold]written[/] {marked_text(_without_targets(samples), shown.tokenizer)}"
        return
    if samples.causal is not None:
        yield f"{len(samples.tokens)} tokens, {len(samples.target_ids)} of them predicted from those before:"
        yield ""
        yield from _marked_text_lines(replace(shown, samples=_without_targets(samples)))
        return
    yield f"{len(samples.tokens)} tokens, {len(samples.target_ids)} targets, marked [input -> original]:".replace(
        "[", "\\["
    )
    yield ""
    yield from _marked_text_lines(shown)
    yield ""
    yield "position  original        input"
    for position, original in zip(samples.target_positions, samples.target_ids, strict=True):
        yield _target_line(int(position), int(original), int(samples.tokens[position]), shown.tokenizer)


def _marked_text_lines(shown: Shown) -> Iterator[str]:
    """Yield the marked text: one line, or a line for each segment and one for the label."""
    samples = shown.samples
    if samples.segment_starts is None:
        yield marked_text(samples, shown.tokenizer)
        return
    middle, end = int(samples.segment_starts[0]), len(samples.tokens)
    for name, segment in zip(_segment_names(shown), (range(middle), range(middle, end)), strict=True):
        if segment:
            yield f"[bold]{name}[/] {marked_text(samples, shown.tokenizer, segment)}"
    if samples.pair_label is not None:
        label = int(samples.pair_label[0])
        yield f"pair label {label}: {_pair_label_meaning(shown.input, label)}"


def _without_targets(samples: Samples) -> Samples:
    none = samples.target_positions[:0]
    return replace(samples, target_positions=none, target_ids=samples.target_ids[:0])


def _segment_names(shown: Shown) -> tuple[str, str]:
    """Return the names of the two segments: A and B, or the languages of a translation, if they are known."""
    languages = shown.source.languages
    if not isinstance(shown.input, Translations) or not languages:
        return "A", "B"
    return escape(escape_controls(languages[0])), escape(escape_controls(languages[-1]))


def _example_text_lines(shown: Shown) -> Iterator[str]:
    """Yield a line for each text of an example, with its role (such as query or positive)."""
    samples = shown.samples
    assert samples.text_starts is not None
    edges = [*samples.text_starts[0].tolist(), len(samples.tokens)]
    yield f"{len(samples.tokens)} tokens in {len(edges) - 1} texts, one example:"
    yield ""
    for name, (start, stop) in zip(_text_names(shown.input), pairwise(edges), strict=True):
        yield f"[bold]{name}[/] ({stop - start} tokens) {marked_text(samples, shown.tokenizer, range(start, stop))}"


def _text_names(input_settings: Input) -> tuple[str, ...]:
    return (
        PairTexts(input_settings.negatives).text_names
        if isinstance(input_settings, TextPairs)
        else ("sentence", "the same")
    )


def _pair_label_meaning(input_settings: Input, label: int) -> str:
    if isinstance(input_settings, OrderedPairs):
        return "B is not what follows A" if label else "B follows A"
    return "B is from elsewhere" if label else "B follows A"


def _text_location(source: SampleText) -> str:
    """Return the token ranges of the text in its block, one for each segment."""
    return " and ".join(f"text tokens {stretch.start} to {stretch.stop}" for stretch in source.stretches)


def marked_text(samples: Samples, tokenizer: Tokenizer, part: range | None = None) -> str:
    """Return the row, or a part of its tokens, as text in rich's markup, with targets as `[input -> original]`."""
    part = range(len(samples.tokens)) if part is None else part
    target = np.full(len(samples.tokens), -1, dtype=np.int64)
    target[samples.target_positions] = samples.target_ids
    parts = []
    for is_target, run in groupby(part, key=lambda index: bool(target[index] >= 0)):
        indices = list(run)
        if is_target:
            parts += [_replaced_token_markup(int(samples.tokens[i]), int(target[i]), tokenizer) for i in indices]
        else:
            parts.append(escape(escape_controls(tokenizer.decode(samples.tokens[indices]))))
    return "".join(parts)


def _replaced_token_markup(input_id: int, original_id: int, tokenizer: Tokenizer) -> str:
    pair = f"[{tokenizer.decode([input_id])} -> {tokenizer.decode([original_id])}]"
    return f"[bold yellow]{escape(escape_controls(pair))}[/]"


def _target_line(position: int, original_id: int, input_id: int, tokenizer: Tokenizer) -> str:
    kind = "masked" if input_id == tokenizer.special.mask else "kept" if input_id == original_id else "random"
    piece = "" if kind == "kept" else f"  {tokenizer.piece(input_id)}"
    return escape(escape_controls(f"{position:8}  {tokenizer.piece(original_id):<14}  {kind}{piece}"))


def _sample_position(ranges: tuple[SampleRange, ...], row: int) -> tuple[int, int, int] | None:
    """Return phase, epoch and sample of a row of a step; None if the step has fewer rows."""
    for span in ranges:
        if row < span.stop - span.start:
            return span.phase, span.epoch, span.start + row
        row -= span.stop - span.start
    return None
