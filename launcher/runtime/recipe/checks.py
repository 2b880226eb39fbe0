"""Finds combinations of recipe values that cannot work, each with its path, the reason and a remedy."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from pydantic import ValidationError

from data_service.samples.lanes import Lanes
from data_service.samples.masking import MlmMasking
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.mup import mup_base
from encoder_core.optim.schedules import ScheduleConfig
from launcher.runtime.policies.elastic import Trainers
from launcher.runtime.recipe.document import KeyPath, reason_text
from launcher.runtime.recipe.objective_checks import batch_and_mixing_issues, language_issues, objective_issues
from launcher.runtime.recipe.parts import RecipeIssue
from launcher.runtime.recipe.phase_parts import PhaseMixture
from launcher.runtime.recipe.phases import PHASE_KEYS, changing_rate, is_staged, recipe_in_phase
from launcher.runtime.recipe.schema import TEACHER, Recipe
from launcher.runtime.recipe.timeline import recipe_at, term_weights


def combination_issues(recipe: Recipe) -> list[RecipeIssue]:
    """Return every impossible combination in `recipe`; empty if there is none."""
    return [
        *_start_issues(recipe),
        *_source_weight_issues(recipe),
        *_batch_issues(recipe),
        *_batch_warmup_issues(recipe),
        *_phase_key_issues(recipe),
        *_mask_issues(recipe),
        *_term_weight_issues(recipe),
        *_length_issues(recipe),
        *_mixture_issues(recipe),
        *_phase_corpus_issues(recipe),
        *_schedule_issues(recipe),
        *_mup_issues(recipe),
        *_shuffle_issues(recipe),
        *_precision_issues(recipe),
        *_trainer_issues(recipe),
        *_evaluation_issues(recipe),
        *objective_issues(recipe),
        *batch_and_mixing_issues(recipe),
        *language_issues(recipe),
    ]


def tokenizer_issues(recipe: Recipe, tokenizer: Tokenizer) -> list[RecipeIssue]:
    """Return the reasons why `tokenizer` cannot be used with `recipe`; empty if it can."""
    return [*_vocabulary_issues(recipe, tokenizer), *_word_issues(recipe, tokenizer)]


def _vocabulary_issues(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[RecipeIssue]:
    vocab, size = recipe.model.vocab, tokenizer.vocab_size
    if vocab is not None and vocab < size:
        yield RecipeIssue(
            ("model", "vocab"),
            f"the tokenizer has {size:,} ids, the model's vocabulary only {vocab:,}",
            f"set model.vocab to {size} or more, or to null to take the tokenizer's size",
        )


def _word_issues(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[RecipeIssue]:
    masking = recipe.objective.masking
    if masking.unit not in ("token", "piece") and not tokenizer.word_starts[~tokenizer.special_mask].any():
        yield RecipeIssue(
            ("objective", masking.kind, "unit"),
            f"masking by {masking.unit} needs words, but no piece of the tokenizer begins a word",
            "mask by token, or train a tokenizer that marks where words begin",
        )


def _start_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.start != TEACHER:
        return
    distil = recipe.objective.distil
    if distil is None:
        yield RecipeIssue(
            ("start",),
            "start=teacher begins with layers of a teacher, but the recipe has no teacher",
            "add objective.distil, or start from scratch, a run or a folder",
        )
    elif distil.teachers[0].model.distinct_layer_count < recipe.model.distinct_layer_count:
        yield RecipeIssue(
            ("start",),
            f"the student begins with layers of its first teacher, but has {recipe.model.distinct_layer_count} layers, "
            f"and the teacher only {distil.teachers[0].model.distinct_layer_count}",
            "set model.layers to the teacher's number of layers or fewer, or start: scratch",
        )


def _source_weight_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    automatic = [name for name, source in recipe.corpus.sources.items() if source.weight == "auto"]
    if automatic and len(automatic) < len(recipe.corpus.sources):
        yield RecipeIssue(
            ("corpus", "sources", automatic[0], "weight"),
            "some sources have a weight and others auto",
            "give every source a weight, or all of them auto (each is then read once an epoch)",
        )


def _batch_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        rows, tokens = phase.batch.sequences, phase.batch.tokens
        microbatch = recipe.microbatch_rows(phase)
        if rows is not None and rows % microbatch:  # never true with "auto", where a microbatch is all rows
            yield RecipeIssue(
                ("phases", index, "batch", "sequences"),
                f"a batch of {rows} rows does not divide into microbatches of {microbatch}",
                f"use a multiple of {microbatch}, or change `microbatch` in this phase or in the recipe",
            )
        if tokens is not None and tokens < phase.length:
            yield RecipeIssue(
                ("phases", index, "batch", "tokens"),
                f"a batch of {tokens} tokens cannot hold one row of {phase.length} tokens",
                f"use at least {phase.length} tokens",
            )


def _batch_warmup_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        warmup, path = phase.batch.warmup, ("phases", index, "batch", "warmup")
        if warmup is None:
            continue
        rows = phase.batch.sequences
        full, least = (rows, 1) if rows else (phase.batch.tokens or 0, phase.length)
        if warmup.start >= full:
            yield RecipeIssue(
                (*path, "start"),
                f"the batch warmup rises from {warmup.start:,} to {full:,}, which is not larger",
                f"start with less than {full:,}, or leave the warmup out",
            )
        if warmup.start < least:
            yield RecipeIssue(
                (*path, "start"),
                f"a first batch of {warmup.start:,} tokens cannot hold one row of {least} tokens",
                f"start with at least {least}",
            )
        if warmup.steps > phase.steps:
            yield RecipeIssue(
                (*path, "steps"),
                f"the batch warmup takes {warmup.steps:,} steps, but the phase has {phase.steps:,}",
                f"use at most {phase.steps:,} steps",
            )
        if isinstance(recipe.input, Lanes) or recipe.mixing.batches == "one_source":
            what = "input.packing=lanes" if isinstance(recipe.input, Lanes) else "mixing.batches=one_source"
            yield RecipeIssue(
                path,
                f"{what} needs the same number of rows in each step of a phase",
                "use phases with different batches, or leave the warmup out",
            )


def _phase_key_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        for key in PHASE_KEYS:
            refusal = key.refusal(recipe) if key.is_set(phase) else None
            if refusal is not None:
                yield RecipeIssue(("phases", index, key.name), *refusal)


def _mask_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        mlm = recipe_in_phase(recipe, phase).objective.mlm
        if mlm is not None:
            yield from _phase_mask_issues(recipe, mlm, None if phase.mlm is None else index)
        if mlm is not None and changing_rate(phase) is not None:
            yield from _changing_mask_issues(recipe, index)


def _phase_mask_issues(recipe: Recipe, mlm: MlmMasking, phase: int | None) -> Iterator[RecipeIssue]:
    """Yield what is wrong with the masks of a phase. `phase`: None if it uses the objective's own masks."""
    path: KeyPath = ("objective", "mlm") if phase is None else ("phases", phase, "mlm")
    if mlm.replace.similar and recipe.similar_words is None:
        yield RecipeIssue(
            (*path, "replace", "similar"),
            "words are to be replaced by similar ones, but the recipe names no table of similar words",
            "set similar_words.uri to the table that `maskfleet corpus similar-words` wrote",
        )
    try:
        type(mlm).model_validate(mlm.model_dump())
    except ValidationError as error:
        yield RecipeIssue(
            path,
            f"combined with the objective's settings: {reason_text(error.errors()[0])}",
            "remove the settings of objective.mlm that only suit another unit, or set phases.N.mlm.replace too",
        )


def _changing_mask_issues(recipe: Recipe, index: int) -> Iterator[RecipeIssue]:
    """Yield why the masking rate cannot change within a phase. The rate is a function of the row's number in the phase,
    so the phase needs a known number of rows, planned from its first row."""
    path: KeyPath = ("phases", index, "mlm", "rate")
    if recipe.phases[index].batch.tokens is not None:
        yield RecipeIssue(
            path,
            "a masking rate that changes within a phase needs a known number of rows, but the batch is given in tokens",
            "give the batch in sequences, or use several phases with one constant rate each",
        )
    if not is_staged(recipe):
        yield RecipeIssue(
            path,
            "a masking rate that changes within a phase needs phases that continue the sources of the phase before",
            f"set phases.{index}.mixture to {{}}, or use several phases with one constant rate each",
        )


def _term_weight_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        for name in phase.weights or {}:
            if name not in recipe.objective.terms:
                yield RecipeIssue(
                    ("phases", index, "weights", name),
                    f"the phase sets a weight for {name}, which is not a term of the objective",
                    f"use one of {', '.join(recipe.objective.terms)}, or add objective.{name}",
                )
    for step in _checked_steps(recipe):
        weighed, trained = term_weights(recipe, step), set(recipe_at(recipe, step).objective.terms)
        if trained <= weighed.keys() and not any(weighed[name] for name in trained):
            yield RecipeIssue(
                ("objective",),
                f"all terms have weight 0 in step {step:,}, so the step would train nothing",
                "give one term a weight above 0 in this step",
            )


def _checked_steps(recipe: Recipe) -> list[int]:
    """Return the first and the last step of each phase. Checking these is enough: a term whose weight is above 0 in two
    steps of a phase has a weight above 0 between them, too."""
    ends = list(accumulate(phase.steps for phase in recipe.phases))
    return [step for begin, end in pairwise([0, *ends]) for step in (begin, end - 1)]


def _length_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        if phase.length > recipe.model.max_length:
            yield RecipeIssue(
                ("phases", index, "length"),
                f"rows of {phase.length} tokens exceed the model's max_length of {recipe.model.max_length}",
                "shorten the phase's length or raise model.max_length",
            )


def _mixture_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        if phase.mixture is None:
            continue
        path = ("phases", index, "mixture")
        weights = phase.mixture.weights
        for name in (weights or {}).keys() - recipe.corpus.sources.keys():
            yield RecipeIssue(
                (*path, "weights", name),
                f"the phase sets a weight for {name}, which is not a source of the corpus",
                f"use one of {', '.join(recipe.corpus.sources)}, or add corpus.sources.{name}",
            )
        yield from _automatic_source_issues(recipe, phase.mixture, path)
        if weights is not None and not any(weights.values()):
            yield RecipeIssue(
                (*path, "weights"),
                "all sources have weight 0, so the phase would read nothing",
                "give at least one source a weight above 0",
            )


def _automatic_source_issues(recipe: Recipe, mixture: PhaseMixture, path: KeyPath) -> Iterator[RecipeIssue]:
    weights = mixture.weights or {name: source.weight for name, source in recipe.corpus.sources.items()}
    numbers = [weight for weight in weights.values() if weight != "auto"]
    if len(numbers) == len(weights) and mixture.temperature is not None:
        yield RecipeIssue(
            (*path, "temperature"),
            "a temperature applies to sources with weight auto, but the phase has none",
            "remove the temperature, or set weights of the phase to auto",
        )
    if numbers and len(numbers) < len(weights) and sum(numbers) >= 1 and mixture.weights:
        yield RecipeIssue(
            (*path, "weights"),
            f"sources with weight auto share the remainder to 1, but the other weights add up to {sum(numbers):g}",
            "let the numeric weights add up to less than 1: they are shares of the phase's tokens",
        )


def _phase_corpus_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    for index, phase in enumerate(recipe.phases):
        for name in (phase.corpora or {}).keys() - recipe.corpus.sources.keys():
            yield RecipeIssue(
                ("phases", index, "corpora", name),
                f"the phase reads a corpus in place of {name}, which is not a source",
                f"name one of {', '.join(recipe.corpus.sources)}",
            )


def _schedule_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if any(phase.schedule is None for phase in recipe.phases):
        yield from _schedule_fit_issues(recipe.schedule, ("schedule",), "the run", recipe.total_steps)
    for index, phase in enumerate(recipe.phases):
        if phase.schedule is not None:
            path = ("phases", index, "schedule")
            yield from _schedule_fit_issues(phase.schedule, path, "the phase", phase.steps)


def _schedule_fit_issues(schedule: ScheduleConfig, path: KeyPath, owner: str, steps: int) -> Iterator[RecipeIssue]:
    """Yield why `schedule` does not fit into the `steps` of its `owner`: "the run" or "the phase"."""
    if schedule.warmup > steps:
        yield RecipeIssue(
            (*path, "warmup"),
            f"a warmup of {schedule.warmup:,} steps is longer than {owner}'s {steps:,}",
            f"shorten the warmup or add steps to {owner.replace('run', 'phases')}",
        )
    elif schedule.least_steps > steps:
        yield RecipeIssue(
            (*path, "decay_steps"),
            f"a warmup of {schedule.warmup:,} and a decay of {schedule.decay_steps:,} steps do not fit into "
            f"{owner}'s {steps:,}",
            f"decay in at most {steps - schedule.warmup:,} steps, or leave decay_steps out to decay after the warmup",
        )
    if schedule.restarts >= (schedule.decay_steps or max(1, steps - schedule.warmup)):
        yield RecipeIssue(
            (*path, "restarts"),
            f"{schedule.restarts:,} restarts leave less than one step for each decay",
            "restart less often, or decay in more steps",
        )


def _mup_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.model.mup is None:
        return
    try:
        mup_base(recipe.model)
    except ModelError as error:
        yield RecipeIssue(("model", "mup"), error.problem, error.remedy)
    if recipe.optimizer.lamb is not None:
        yield RecipeIssue(
            ("optimizer", "lamb"),
            "muP scales the learning rates of AdamW, StableAdamW and Muon; LAMB scales its own by the weights' norms",
            "use adamw, stableadamw or muon, or leave model.mup out",
        )


def _shuffle_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.shuffle == "spread" and isinstance(recipe.input, Lanes):
        yield RecipeIssue(
            ("shuffle",),
            "with input.packing=lanes, rows continue from step to step, so they cannot be shuffled",
            "set shuffle to uniform",
        )


def _precision_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.precision == "bf16" and recipe.zero == 0:
        yield RecipeIssue(
            ("zero",),
            "bf16 at ZeRO stage 0 would accumulate gradients in bf16, and lose small ones",
            "use zero: 1 (the default), 2 or 3, or precision: fp32",
        )
    if recipe.precision == "fp32" and recipe.reduce_dtype == "bf16":
        yield RecipeIssue(
            ("reduce_dtype",),
            "ranks would sum fp32 gradients in bf16, and lose the precision of fp32",
            "use reduce_dtype: fp32, or precision: bf16",
        )


def _trainer_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if isinstance(recipe.trainers, Trainers) and recipe.trainers.min > recipe.max_microbatches_per_step:
        yield RecipeIssue(
            ("trainers", "min"),
            f"{recipe.trainers.min} ranks cannot share {recipe.max_microbatches_per_step} microbatches, the most "
            "that a step has",
            f"set trainers.min to {recipe.max_microbatches_per_step} or less, or use a smaller microbatch",
        )


def _evaluation_issues(recipe: Recipe) -> Iterator[RecipeIssue]:
    if recipe.corpus.heldout.fraction == 0:
        yield RecipeIssue(
            ("corpus", "heldout", "fraction"),
            "evaluation needs held-out documents, but the held-out fraction is 0",
            "build the corpora with a held-out fraction above 0, and set the same fraction here",
        )
