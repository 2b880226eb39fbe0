"""The data of a run: its streams of training and held-out samples, and which samples each step reads. After a loss
spike, the run returns to an earlier checkpoint and skips the samples that it read since."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import TypeAdapter

from checkpoints.gather import Peers, SingleRank, broadcast_or_raise
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import Rewind, SampleSpan, read_rewinds, skipped_ranges
from checkpoints.verify import find_newest_good
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.removals import load_removals
from data_service.samples.lanes import Lanes
from data_service.samples.similar_words import SimilarSource
from data_service.samples.spec import Annealing, SourceSpec, Stage, StreamSpec, WindowSize
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.store.open import open_store
from data_service.stream.positions import PhaseBatches, SampleAxis, SampleRange, StepSampleRanges, StreamAxis
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.families.catalogue import embedded_languages
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_name
from launcher.runtime.recipe.phase_parts import PhaseMixture
from launcher.runtime.recipe.phases import changing_rate, is_staged, planned_steps, recipe_in_phase, source_shares
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.timeline import batch_schedule
from launcher.runtime.run.record import Run

SPIKES_KEY = "spikes"
"""Key of the spike policy's `SpikeHistory` in the state of a checkpoint's manifest."""
_REWINDS_ADAPTER = TypeAdapter(tuple[Rewind, ...])  # parses the rewinds that rank 0 sends to all ranks


@dataclass(frozen=True)
class SkippedData:
    """The data that a resumed run skips because of loss spikes, and its rewinds to earlier checkpoints.

    Attributes:
        spans: the skipped ranges of samples.
        gone_back: the rewinds so far, the oldest first.
    """

    spans: tuple[SampleSpan, ...]
    gone_back: tuple[Rewind, ...]

    @property
    def ranges(self) -> tuple[SampleRange, ...]:
        return tuple(SampleRange(*span) for span in self.spans)


def read_skipped_data(run: Run, good: CheckpointManifest | None, peers: Peers) -> SkippedData:
    """Return the skipped data and the rewinds on all ranks; only rank 0 reads the store. Raises StoreError on all
    ranks. `good`: manifest of the checkpoint to resume from, if any."""
    gone_back = broadcast_or_raise(peers, lambda: tuple(read_rewinds(run.store)), _REWINDS_ADAPTER)
    return SkippedData(skipped_ranges(good, gone_back), gone_back)


def current_skipped_ranges(run: Run) -> tuple[SampleRange, ...]:
    """Return the ranges of samples that a resume would skip now. Raises NoGoodCheckpoint, StoreError."""
    good = find_newest_good(run.store, SingleRank(), full=False)
    return read_skipped_data(run, good.manifest if good else None, SingleRank()).ranges


LANES_WINDOW_BATCHES = 64  # number of batches in a shuffle window; each lane (row that continues) ends with it


class StreamLength(Protocol):
    """The part of a stream that positions need: the length of its epochs, in samples and in tokens."""

    @property
    def samples_per_epoch(self) -> int: ...

    def token_axis(self) -> StreamAxis: ...


def stream_spec(run: Run, tokenizer: Tokenizer, phase: int) -> StreamSpec:
    """Return the spec of the stream of training samples of phase number `phase`."""
    batch, length = run.recipe.phases[phase].batch, run.recipe.phases[phase].length
    masking = recipe_in_phase(run.recipe, run.recipe.phases[phase]).objective.masking
    rows = batch.sequences or max(1, (batch.tokens or length) // length)
    lanes = rows if isinstance(run.recipe.input, Lanes) else None
    if lanes is None:
        window = WindowSize.from_batches(rows, is_spread=run.recipe.shuffle == "spread")
    else:
        window = WindowSize(samples=LANES_WINDOW_BATCHES * rows)
    spec = _split_spec(run, tokenizer, "train", length, window, lanes, phase)
    one_source = rows if run.recipe.mixing.batches == "one_source" else None
    stages = _stages(run, phase) if is_staged(run.recipe) else ()
    annealing = _annealing(run, phase)
    changing = changing_rate(run.recipe.phases[phase])
    if changing is not None:
        masking = masking.model_copy(update={"rate": changing.start})
    return spec.model_copy(
        update={"one_source": one_source, "masking": masking, "stages": stages, "annealing": annealing}
    )


def _annealing(run: Run, phase_number: int) -> Annealing | None:
    """Return how the masking rate changes in the phase, by its number of samples; None if the rate is constant."""
    phase = run.recipe.phases[phase_number]
    changing, before = changing_rate(phase), batch_schedule(run.recipe, phase).units_before
    if changing is None:
        return None
    start = sum(each.steps for each in run.recipe.phases[:phase_number])
    passed = before(min(max(0, run.record.data_begins - start), phase.steps))
    return Annealing(end=changing.end, samples=before(planned_steps(phase)), before=passed)


def _stages(run: Run, last_phase: int) -> tuple[Stage, ...]:
    """Return the stages (`samples.spec.Stage`) of the phases up to `last_phase` that read this run's data: a fork whose
    data starts from the beginning omits earlier phases."""
    found, start = [], 0
    for number, phase in enumerate(run.recipe.phases[: last_phase + 1]):
        begin = max(0, run.record.data_begins - start)
        start += phase.steps
        if begin < phase.steps or number == last_phase:
            begin = begin if begin < phase.steps else 0
            found.append(_stage(run.recipe, number, begin, last=number == last_phase))
    return tuple(found)


def _stage(recipe: Recipe, number: int, begin: int, *, last: bool) -> Stage:
    """Return the stage of phase `number`, which reads data from its step `begin` on. With `last`, its number of
    epochs is left at 1."""
    phase, before = recipe.phases[number], batch_schedule(recipe, recipe.phases[number]).units_before
    planned = planned_steps(phase) if planned_steps(phase) > begin else phase.steps
    units, mixture = before(planned) - before(begin), phase.mixture or PhaseMixture()
    shares = source_shares(recipe, phase)
    return Stage(
        phase=number,
        length=phase.length,
        units=units,
        in_tokens=phase.batch.tokens is not None,
        epochs=1 if last else -(-(before(phase.steps) - before(begin)) // units),
        weights=() if shares is None else tuple(shares.values()),
        temperature=mixture.temperature,
        most_readings=mixture.most_readings,
    )


def heldout_spec(run: Run, tokenizer: Tokenizer, phase: int = -1) -> StreamSpec:
    """Return the spec of the held-out samples: rows as long as in the last phase, each text cut in one way only, with
    the objective's masks of epoch 0.

    `phase`: number of the phase in which they are evaluated. In a causal phase (clm), the rows are for clm."""
    last, objective = run.recipe.phases[-1], run.recipe.objective
    spec = _split_spec(run, tokenizer, "heldout", last.length, WindowSize(), lanes=None)
    own = objective.for_rows(causal=recipe_in_phase(run.recipe, run.recipe.phases[phase]).objective.causal)
    return spec.model_copy(update={"input": run.recipe.input.with_single_cut(), "masking": own.masking})


def heldout_specs(run: Run, tokenizer: Tokenizer) -> list[StreamSpec]:
    """Return the spec of the held-out samples of each phase. Phases with the same objective have equal specs."""
    return [heldout_spec(run, tokenizer, phase) for phase in range(len(run.recipe.phases))]


def before_text_specs(run: Run, tokenizer: Tokenizer) -> list[StreamSpec]:
    """Return the specs of held-out samples of the corpus `evaluation.before` in its present state; [] without it.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
        StoreError: its store cannot be read.
    """
    before = run.recipe.evaluation.before
    if before is None:
        return []
    store = open_store(before.uri)
    manifest = load_manifest(store)
    source = SourceSpec(
        name="before",
        uri=before.uri,
        manifest_fingerprint=manifest.fingerprint,
        removals=load_removals(store, manifest).digest,
    )
    return [spec.model_copy(update={"sources": (source,)}) for spec in heldout_specs(run, tokenizer)]


def sample_positions(run: Run, streams: Sequence[StreamLength], skips: Sequence[SampleRange]) -> StepSampleRanges:
    """Return which samples each step reads.

    Args:
        streams: the stream of each phase.
        skips: ranges of samples that the run skips.
    """
    phases = [_phase_batches(run, phase, stream) for phase, stream in zip(run.recipe.phases, streams, strict=True)]
    return StepSampleRanges(phases, skips, begin=run.record.data_begins)


def _similar_word_source(run: Run) -> SimilarSource | None:
    table, content = run.recipe.similar_words, run.record.inputs.similar_words
    return None if table is None or content is None else SimilarSource(uri=table.uri, hash=content)


def _phase_batches(run: Run, phase: RecipePhase, stream: StreamLength) -> PhaseBatches:
    batches, samples = batch_schedule(run.recipe, phase), stream.samples_per_epoch
    in_rows = phase.batch.sequences is not None
    axis = SampleAxis(samples) if in_rows else stream.token_axis()
    staged = is_staged(run.recipe)
    return PhaseBatches(phase.steps, batches.batch, samples, axis, batches.rise, staged)


def _split_spec(
    run: Run,
    tokenizer: Tokenizer,
    split: Literal["train", "heldout"],
    length: int,
    window: WindowSize,
    lanes: int | None,
    phase: int | None = None,
) -> StreamSpec:
    """Return the spec of samples of `split`. `phase`: the phase whose corpora are read; None: `corpus.sources`."""
    recipe, corpora = run.recipe, corpora_by_name(run.recipe)
    texts = isinstance(recipe.input, TextPairs | RepeatedSentences)
    return StreamSpec(
        sources=tuple(
            SourceSpec(
                name=name,
                uri=corpora[corpus].uri,
                manifest_fingerprint=run.record.inputs.corpora[corpus],
                weight=None if source.weight == "auto" else source.weight,
                languages=source.languages,
                removals=run.removals.get(corpus, ""),
            )
            for name, source in recipe.corpus.sources.items()
            for corpus in [name if phase is None else corpus_name(recipe, phase, name)]
        ),
        split=split,
        input=recipe.input,
        length=length,
        masking=recipe.objective.masking,
        lanes=lanes,
        temperature=recipe.mixing.temperature,
        translations=recipe.mixing.translations,
        languages=embedded_languages(recipe.model),
        layout="cls_last" if texts and recipe.model.class_token_last else "cls_first",
        similar=_similar_word_source(run),
        special=tokenizer.special,
        never_masked=tuple(int(i) for i in tokenizer.special_mask.nonzero()[0]),
        vocab_size=tokenizer.vocab_size,
        seed=recipe.seed,
        window=window,
    )
