"""From a run to the things its recipe describes: data streams, model, optimizer, schedule. A small function each."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from data_service.samples.inputs import Lanes, RepeatedSentences, TextPairs
from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.stream.positions import Axis, Phase, Positions, Range
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.losses import Objective
from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.lamb import Lamb, LambConfig
from encoder_core.optim.schedules import learning_rate
from encoder_core.train.engine_config import EngineConfig
from encoder_core.train.loop import Plan
from encoder_core.train.step import draw_seed
from launcher.objective import objective_module
from launcher.recipe import Phase as RecipePhase
from launcher.recipe import Recipe
from launcher.runs import Run

LANES_WINDOW_BATCHES = 64  # every lane breaks off where a window ends
WEIGHTS_STEP = -1  # the "step" from whose draws the initial weights come


class Measured(Protocol):
    """How long a stream's epochs are, in samples and in tokens."""

    @property
    def samples_per_epoch(self) -> int: ...

    def token_axis(self) -> Axis: ...


def stream_spec(run: Run, tokenizer: Tokenizer, phase: int) -> StreamSpec:
    """The training samples of one phase."""
    batch = run.recipe.phases[phase].batch
    length = run.recipe.phases[phase].length
    rows = batch.sequences or max(1, (batch.tokens or length) // length)
    lanes = rows if isinstance(run.recipe.input, Lanes) else None
    if lanes is None:
        window = WindowSize.of_batches(rows, spread=run.recipe.shuffle == "spread")
    else:
        window = WindowSize(samples=LANES_WINDOW_BATCHES * rows)
    spec = _spec(run, tokenizer, "train", length, window, lanes)
    one_source = rows if run.recipe.mixing.batches == "one_source" else None
    return spec.model_copy(update={"one_source": one_source})


def heldout_spec(run: Run, tokenizer: Tokenizer) -> StreamSpec:
    """The held-out samples, as long as the last phase's, cut in one way, under the masks of their epoch 0."""
    last = run.recipe.phases[-1]
    spec = _spec(run, tokenizer, "heldout", last.length, WindowSize(), lanes=None)
    return spec.model_copy(update={"input": run.recipe.input.once()})


def positions(run: Run, streams: Sequence[Measured], skips: Sequence[Range]) -> Positions:
    """From step to samples, given each phase's stream, without the ranges that the run leaves out."""
    phases = [_phase(phase, stream) for phase, stream in zip(run.recipe.phases, streams, strict=True)]
    return Positions(phases, skips, begin=run.record.data_begins)


def _phase(phase: RecipePhase, stream: Measured) -> Phase:
    if phase.batch.sequences is not None:
        return Phase.of_samples(phase.steps, phase.batch.sequences, stream.samples_per_epoch)
    assert phase.batch.tokens is not None  # the recipe has exactly one
    return Phase(phase.steps, phase.batch.tokens, stream.samples_per_epoch, stream.token_axis())


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Objective:
    """The model with fresh weights: a function of the recipe's seed, on any machine."""
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    model = objective_module(config, recipe.objective, checkpoint_activations=recipe.activation_checkpointing)
    torch.manual_seed(draw_seed(recipe.seed, WEIGHTS_STEP, 0))
    initialise(model, config.initializer_range, config.initializer)
    return model


def build_optimizer(recipe: Recipe, model: Objective) -> torch.optim.Optimizer:
    """AdamW or LAMB over the model's decay groups. Its learning rate and update number come with each update."""
    settings = optimizer_settings(recipe)
    groups = parameter_groups(model, settings.weight_decay, decayed=settings.decayed, turns=model.turns())
    return AdamW(groups, settings) if isinstance(settings, AdamWConfig) else Lamb(groups, settings)


def optimizer_settings(recipe: Recipe) -> AdamWConfig | LambConfig:
    settings = recipe.optimizer.adamw or recipe.optimizer.lamb
    assert settings is not None  # the recipe has exactly one
    return settings


def engine_config(recipe: Recipe) -> EngineConfig:
    return EngineConfig(
        recipe.zero,
        recipe.precision,
        optimizer_settings(recipe).clip,
        recipe.stage3_persistence,
        recipe.reduce_dtype,
    )


def plan(recipe: Recipe) -> Plan:
    """What is done at which step."""
    compare_every = recipe.replicas.interval(recipe.zero)
    return Plan(
        recipe.seed, recipe.total_steps, schedule(recipe), recipe.evaluation.every.steps, compare_every
    )


def schedule(recipe: Recipe) -> Callable[[int], float]:
    """Step -> learning rate."""
    peak, total = optimizer_settings(recipe).lr, recipe.total_steps
    return lambda step: learning_rate(recipe.schedule, peak=peak, total=total, step=step)


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
            )
            for name, source in recipe.corpus.sources.items()
        ),
        split=split,
        input=recipe.input,
        length=length,
        masking=recipe.objective.masking,
        lanes=lanes,
        temperature=recipe.mixing.temperature,
        layout="cls_last" if texts and isinstance(recipe.model, XlnetConfig) else "cls_first",
        special=tokenizer.special,
        never_masked=tuple(int(i) for i in tokenizer.special_mask.nonzero()[0]),
        vocab_size=tokenizer.vocab_size,
        seed=recipe.seed,
        window=window,
    )
