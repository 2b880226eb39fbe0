"""The data that a run's recipe describes: streams of training and held-out samples, and which samples a step takes."""

from collections.abc import Sequence
from typing import Literal, Protocol

from data_service.samples.inputs import Lanes, RepeatedSentences, TextPairs
from data_service.samples.spec import SimilarSource, SourceSpec, StreamSpec, WindowSize
from data_service.stream.positions import Axis, PhaseBatches, Positions, Range
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.families.build import language_table
from encoder_core.families.xlnet import XlnetConfig
from launcher.recipe.schema import RecipePhase
from launcher.recipe.timeline import phase_objective, step_batches
from launcher.run.record import Run

LANES_WINDOW_BATCHES = 64  # every lane breaks off where a window ends


class StreamLength(Protocol):
    """How long a stream's epochs are, in samples and in tokens."""

    @property
    def samples_per_epoch(self) -> int: ...

    def token_axis(self) -> Axis: ...


def stream_spec(run: Run, tokenizer: Tokenizer, phase: int) -> StreamSpec:
    """The training samples of one phase."""
    batch, length = run.recipe.phases[phase].batch, run.recipe.phases[phase].length
    masking = phase_objective(run.recipe, run.recipe.phases[phase]).masking
    rows = batch.sequences or max(1, (batch.tokens or length) // length)
    lanes = rows if isinstance(run.recipe.input, Lanes) else None
    if lanes is None:
        window = WindowSize.of_batches(rows, spread=run.recipe.shuffle == "spread")
    else:
        window = WindowSize(samples=LANES_WINDOW_BATCHES * rows)
    spec = _spec(run, tokenizer, "train", length, window, lanes)
    one_source = rows if run.recipe.mixing.batches == "one_source" else None
    return spec.model_copy(update={"one_source": one_source, "masking": masking})


def heldout_spec(run: Run, tokenizer: Tokenizer) -> StreamSpec:
    """The held-out samples, as long as the last phase's, cut in one way, under the objective's own masks of epoch 0."""
    last = run.recipe.phases[-1]
    spec = _spec(run, tokenizer, "heldout", last.length, WindowSize(), lanes=None)
    return spec.model_copy(update={"input": run.recipe.input.once()})


def sample_positions(run: Run, streams: Sequence[StreamLength], skips: Sequence[Range]) -> Positions:
    """From step to samples, given each phase's stream, without the ranges that the run leaves out."""
    phases = [_phase(run, phase, stream) for phase, stream in zip(run.recipe.phases, streams, strict=True)]
    return Positions(phases, skips, begin=run.record.data_begins)


def _similar_words(run: Run) -> SimilarSource | None:
    table, content = run.recipe.similar_words, run.record.inputs.similar_words
    return None if table is None or content is None else SimilarSource(uri=table.uri, hash=content)


def _phase(run: Run, phase: RecipePhase, stream: StreamLength) -> PhaseBatches:
    batches, samples = step_batches(run.recipe, phase), stream.samples_per_epoch
    if phase.batch.sequences is not None:
        return PhaseBatches.of_samples(phase.steps, batches.batch, samples, batches.rise)
    return PhaseBatches(phase.steps, batches.batch, samples, stream.token_axis(), batches.rise)


def _spec(
    run: Run,
    tokenizer: Tokenizer,
    split: Literal["train", "heldout"],
    length: int,
    window: WindowSize,
    lanes: int | None,
) -> StreamSpec:
    recipe = run.recipe
    texts = isinstance(recipe.input, TextPairs | RepeatedSentences)
    return StreamSpec(
        sources=tuple(
            SourceSpec(
                name=name,
                uri=source.uri,
                manifest_fingerprint=run.record.inputs.corpora[name],
                weight=None if source.weight == "auto" else source.weight,
                languages=source.languages,
            )
            for name, source in recipe.corpus.sources.items()
        ),
        split=split,
        input=recipe.input,
        length=length,
        masking=recipe.objective.masking,
        lanes=lanes,
        temperature=recipe.mixing.temperature,
        translations=recipe.mixing.translations,
        languages=language_table(recipe.model),
        layout="cls_last" if texts and isinstance(recipe.model, XlnetConfig) else "cls_first",
        similar=_similar_words(run),
        special=tokenizer.special,
        never_masked=tuple(int(i) for i in tokenizer.special_mask.nonzero()[0]),
        vocab_size=tokenizer.vocab_size,
        seed=recipe.seed,
        window=window,
    )
