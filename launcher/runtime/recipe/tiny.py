"""Shrinks any recipe so that it trains in minutes on a CPU: the same structure, smaller sizes. It still learns."""

from typing import Literal

from pydantic import ByteSize

from data_service.samples.lanes import Lanes
from data_service.samples.packing import PackedInput
from data_service.samples.pairs import Translations
from data_service.samples.spec import Input
from data_service.samples.texts import RepeatedSentences, TextPairs
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import Mup, SmallForm
from encoder_core.objectives.term import SmallObjective, Weight, WeightSchedule
from encoder_core.optim.schedules import ScheduleConfig
from encoder_core.optim.settings import AdamWConfig, LambConfig
from launcher.errors import RecipeError
from launcher.runtime.policies.elastic import Trainers
from launcher.runtime.recipe.checks import combination_issues
from launcher.runtime.recipe.document import dotted_path
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import (
    PLACEHOLDER,
    BatchSize,
    BatchWarmup,
    Checkpointing,
    DataService,
    Interval,
    Optimizer,
    Recipe,
    RecipeEvaluation,
    RecipePhase,
    StepInterval,
)

STEPS = 2000  # optimizer steps of a tiny run
# These tasks need more steps: sentence order and replaced tokens are learned after words.
ORDER_STEPS, DETECTION_STEPS = 4500, 6000
ROWS, MICROBATCH = 32, 16  # rows of a batch and of a microbatch: one microbatch for each of two ranks
LENGTH, LONGEST = 32, 48  # tokens in a row of one segment or of a short phase; tokens in other rows
LAYERS, HIDDEN, HEADS, FEED_FORWARD, EMBEDDING = 2, 128, 4, 512, 64  # sizes of the model
# 0.02 * sqrt(768 / 128): sums over fewer columns have the same spread as in the published models. With 0.02, attention
# begins almost uniform, and the model learns three times as late to attend to neighbouring tokens (BERT: 5.32 nats
# after 2.3 M tokens instead of 0.76 M).
INITIALIZER_RANGE = 0.05
ADAMW_LR, LAMB_LR = 1.5e-3, 1e-2  # peak learning rates
DETECTION_LR = 1e-3  # for ELECTRA: 2.5e-3 has detected nothing after 560 steps, 4e-3 unlearns words
# This rate is lower than ADAMW_LR, because without bias correction the first thousand steps are larger than the rate
# says. This is our explanation; no experiment has isolated it.
UNCORRECTED_LR = 1e-3
WARMUP_DIVISOR = 10  # steps divided by warmup steps
TEXT_COPIES = 4  # ways to cut the text into rows: a small text is read several times, cut in another way each time
POSITION_BUCKETS = 16  # buckets of relative positions
WINDOW = 16  # tokens of local attention: half of a row
MEMORY_REFRESH = 50  # steps after which XLNet's memory is recomputed


def tiny(recipe: Recipe) -> Recipe:
    """Return `recipe` shrunk to train in minutes: two layers of width 128, short rows, batches of 32 rows, a suitable
    learning rate, in fp32.

    The kind of the run stays: packing, objective, optimizer, decay, ZeRO stage, sources, the number of phases and their
    shares of the steps. Dropout is turned off, because such a run reads its text only once or twice. Dropout stays if
    it alone makes the texts of an example differ. A `start` that is a placeholder becomes "scratch".
    """
    optimizer = _small_model_optimizer(recipe.optimizer, is_detector=recipe.objective.rtd is not None)
    phases = _shrink_phases(recipe, lr_scale=optimizer.settings.lr / recipe.optimizer.settings.lr)
    steps = sum(phase.steps for phase in phases)
    longest = max(phase.length for phase in phases)
    quarter = StepInterval(steps=max(1, steps // 4))
    small = recipe.model_copy(
        update={
            "start": "scratch" if recipe.start.startswith(PLACEHOLDER) else recipe.start,
            "model": _small_model(recipe, longest),
            "input": _shrink_input(recipe.input, longest),
            "objective": _rescale_weights(_shrink_objective(recipe.objective, longest), recipe.total_steps, steps),
            "phases": phases,
            "optimizer": optimizer,
            "schedule": _rescale_schedule(
                recipe.schedule, former_steps=recipe.total_steps, steps=steps, has_warmup=True
            ),
            "precision": "fp32",
            "reduce_dtype": "fp32",
            "microbatch": MICROBATCH,
            "trainers": _shrink_trainers(recipe.trainers),
            "activation_checkpointing": False,
            "data_service": DataService(workers=1, memory=ByteSize(256 << 20)),
            "checkpoint": Checkpointing(every=Interval(steps=quarter.steps), keep_last=2),
            "evaluation": RecipeEvaluation(every=quarter, samples=16 * ROWS, before=recipe.evaluation.before),
        }
    )
    if issues := combination_issues(small):
        raise RecipeError(
            "\n".join(f"--tiny: {dotted_path(issue.path)}: {issue.what}" for issue in issues),
            remedy="; ".join(dict.fromkeys(issue.remedy for issue in issues)),
        )
    return small


def _shrink_trainers(trainers: int | Literal["auto"] | Trainers) -> int | Literal["auto"] | Trainers:
    """Return `trainers` with a minimum number of ranks that all get a microbatch in each step."""
    if not isinstance(trainers, Trainers):
        return trainers
    return trainers.model_copy(update={"min": min(trainers.min, ROWS // MICROBATCH)})


def _small_model(recipe: Recipe, longest: int) -> ModelConfig:
    """Return the small model. A student keeps the ratio of its number of layers to its teacher's."""
    alike_but_for_dropout = isinstance(recipe.input, RepeatedSentences) or recipe.objective.contrastive is not None
    small = _shrink_model(recipe.model, longest, keeps_dropout=alike_but_for_dropout)
    if recipe.objective.distil is None:
        return small
    layers = LAYERS * recipe.model.layers // recipe.objective.distil.teachers[0].model.layers
    return small.model_copy(update={"layers": max(1, layers)})


def _shrink_phases(recipe: Recipe, lr_scale: float) -> tuple[RecipePhase, ...]:
    """Return the small phases, with the same shares of the steps. Rows are short if they have one segment, or if the
    phase's rows are shorter than the model's longest."""
    one_segment = isinstance(recipe.input, PackedInput | Lanes | TextPairs | RepeatedSentences)
    steps = _step_count(recipe.objective)
    return tuple(
        _shrink_phase(
            phase,
            max(1, steps * phase.steps // recipe.total_steps),
            LENGTH if one_segment or phase.length < recipe.model.max_length else LONGEST,
            lr_scale,
        )
        for phase in recipe.phases
    )


def _step_count(objective: RecipeObjective) -> int:
    if objective.rtd is not None:
        return DETECTION_STEPS
    return STEPS if objective.sop is None else ORDER_STEPS


def _shrink_phase(phase: RecipePhase, steps: int, max_length: int, lr_scale: float) -> RecipePhase:
    length = min(phase.length, max_length)
    in_rows = phase.batch.sequences is not None
    batch = BatchSize(sequences=ROWS) if in_rows else BatchSize(tokens=ROWS * length)
    if phase.batch.warmup is not None:
        rise = max(1, phase.batch.warmup.steps * steps // phase.steps)
        warmup = BatchWarmup(start=MICROBATCH if in_rows else MICROBATCH * length, steps=rise)
        batch = batch.model_copy(update={"warmup": warmup})
    changes: dict[str, object] = {"steps": steps, "length": length, "batch": batch, "microbatch": None}
    if phase.mixture is not None:
        changes["mixture"] = phase.mixture.model_copy(update={"steps": None, "most_readings": None})
    if phase.weights is not None:
        changes["weights"] = {
            name: _rescale_weight(weight, phase.steps, steps) for name, weight in phase.weights.items()
        }
    if phase.lr is not None:
        changes["lr"] = phase.lr * lr_scale
    if phase.schedule is not None:
        warms = phase.schedule.warmup > 0
        changes["schedule"] = _rescale_schedule(phase.schedule, former_steps=phase.steps, steps=steps, has_warmup=warms)
    return phase.model_copy(update=changes)


def _rescale_schedule(schedule: ScheduleConfig, *, former_steps: int, steps: int, has_warmup: bool) -> ScheduleConfig:
    """Return the schedule with the same shape over `steps` steps instead of `former_steps`."""
    decay = schedule.decay_steps and max(1, schedule.decay_steps * steps // former_steps)
    warmup = min(steps // WARMUP_DIVISOR if has_warmup else 0, steps - (decay or 0))
    restarts = min(schedule.restarts, max(0, (decay or steps - warmup) - 1))
    return schedule.model_copy(update={"warmup": warmup, "decay_steps": decay, "restarts": restarts})


def _rescale_weight(weight: Weight, former_steps: int, steps: int) -> Weight:
    """Return the weight; a schedule covers the same share of `steps` steps as before of `former_steps`."""
    if not isinstance(weight, WeightSchedule):
        return weight
    return weight.model_copy(update={"steps": max(1, weight.steps * steps // former_steps)})


def _shrink_model(model: ModelConfig, length: int, *, keeps_dropout: bool) -> ModelConfig:
    """Return the small model, with the tokenizer's vocabulary. Activation, epsilon, tying and sharing stay the same."""
    form = SmallForm(
        length=length,
        drops=keeps_dropout,
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        embedding=EMBEDDING,
        window=WINDOW,
        buckets=POSITION_BUCKETS,
        memory_refresh=MEMORY_REFRESH,
    )
    return model.model_copy(
        update={
            "layers": LAYERS,
            "hidden": HIDDEN,
            "heads": HEADS,
            "feed_forward": FEED_FORWARD,
            "max_length": length,
            "vocab": None,
            "dropout": model.dropout if keeps_dropout else 0.0,
            "attention_dropout": model.attention_dropout if keeps_dropout else 0.0,
            "initializer_range": INITIALIZER_RANGE,
            "mup": model.mup and Mup(hidden=HIDDEN),
        }
        | model.small_form_fields(form)
    )


def _shrink_input(rows: Input, length: int) -> Input:
    match rows:
        case PackedInput() | TextPairs() | RepeatedSentences() | Translations():
            return rows
        case Lanes():
            return rows.model_copy(update={"reuse": length // 2})
        case _:
            return rows.model_copy(update={"copies": min(rows.copies, TEXT_COPIES)})


def _rescale_weights(objective: RecipeObjective, former_steps: int, steps: int) -> RecipeObjective:
    return objective.model_copy(
        update={
            name: term.model_copy(update={"weight": _rescale_weight(term.weight, former_steps, steps)})
            for name, term in objective.terms.items()
        }
    )


def _shrink_objective(objective: RecipeObjective, length: int) -> RecipeObjective:
    """Return the objective with the small form of each term. Masks stay as they are."""
    form = SmallObjective(length, HIDDEN, lambda model: _shrink_model(model, LONGEST, keeps_dropout=False))
    return objective.model_copy(update={name: term.shrink(form) for name, term in objective.terms.items()})


def _small_model_optimizer(optimizer: Optimizer, *, is_detector: bool) -> Optimizer:
    """Return the optimizer with a learning rate for small models. StableAdamW and Muon are designed for AdamW's rates,
    so they get the same one."""
    match optimizer.settings:
        case LambConfig():
            lr = LAMB_LR
        case AdamWConfig(bias_correction=False) if not is_detector:
            lr = UNCORRECTED_LR
        case _:
            lr = DETECTION_LR if is_detector else ADAMW_LR
    given = optimizer.model_dump()
    return Optimizer.model_validate({name: settings | {"lr": lr} for name, settings in given.items()})
