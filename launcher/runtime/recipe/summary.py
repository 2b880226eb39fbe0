"""Computes figures of a recipe: model size, state, batches, tokens. Also replaces `microbatch: auto` by a number, once
it is known how many rows memory permits.

Microbatches divide a batch evenly: as few for each rank as memory permits, and of about equal size on all ranks.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.compose import weight_count
from encoder_core.objectives.weights import detector_weight_count, masked_lm_weight_count
from launcher.output import human_count
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.timeline import tokens_before

_ASSUMED_VOCABULARY = 50_265  # vocabulary size, if the recipe leaves it to the tokenizer, which is not read


def model_title(recipe: Recipe) -> str:
    """Return the model's usual name: that of its family. If two models share a family, the objective decides."""
    return recipe.model.title(recipe.objective.terms)


def parameter_count(recipe: Recipe, vocabulary: int | None = None) -> int:
    """Return the number of trainable parameters of all networks. Tied parameters count once.

    `vocabulary`: number of the tokenizer's ids, if it is known. It is used if the recipe leaves the size to the
    tokenizer.
    """
    return weight_count(with_vocab(recipe.model, vocabulary), recipe.objective.terms)


def momentum_matrix_shapes(recipe: Recipe) -> list[tuple[int, int]]:
    """Return the shapes of the matrices for which the optimizer has one momentum instead of two moments.

    With Muon these are all trained hidden matrices; matrices that share a parameter are returned one by one. With other
    optimizers there are none.
    """
    return [] if recipe.optimizer.muon is None else _cached_matrix_shapes(with_vocab(recipe.model), recipe.objective)


@lru_cache(maxsize=8)
def _cached_matrix_shapes(model: ModelConfig, objective: RecipeObjective) -> list[tuple[int, int]]:
    """Return the shapes for `momentum_matrix_shapes`. They are cached, because a memory estimate needs them for each
    ZeRO stage and microbatch."""
    from encoder_core.optim.groups import hidden_matrices
    from launcher.runtime.recipe.network import meta_module  # imports torch

    every = hidden_matrices(meta_module(model, objective)).values()
    return [shape for its in every if its.weight.requires_grad for shape in its.shapes]


def largest_tensor_size(recipe: Recipe) -> int:
    """Return the number of elements of the largest trained tensor."""
    return _cached_largest_size(with_vocab(recipe.model), recipe.objective)


@lru_cache(maxsize=8)
def _cached_largest_size(model: ModelConfig, objective: RecipeObjective) -> int:
    from launcher.runtime.recipe.network import meta_module

    return max(p.numel() for p in meta_module(model, objective).parameters() if p.requires_grad)


def state_bytes(recipe: Recipe, count: int) -> int:
    """Return the bytes of a checkpoint of `count` parameters: fp32 weight, moments and, if one is kept, average."""
    return (16 if recipe.average else 12) * count - 4 * sum(prod(shape) for shape in momentum_matrix_shapes(recipe))


def discriminator_parameter_count(recipe: Recipe) -> int | None:
    """Return the number of parameters of the discriminator as it is used after training; None if there is none."""
    model = with_vocab(recipe.model)
    return detector_weight_count(model) if recipe.objective.rtd else None


def teacher_parameter_count(recipe: Recipe) -> int:
    """Return the number of parameters of all teachers together; 0 if there are none."""
    if recipe.objective.distil is None:
        return 0
    vocabulary = {"vocab": with_vocab(recipe.model).vocab}
    return sum(
        masked_lm_weight_count(its.model.model_copy(update=vocabulary)) for its in recipe.objective.distil.teachers
    )


def total_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of the whole run, as if all rows were full."""
    return tokens_before(recipe, recipe.total_steps)


def summary_lines(recipe: Recipe) -> list[str]:
    """Return lines of text that describe the recipe."""
    return [
        f"{recipe.name}: {model_title(recipe)}, {_size_text(recipe)}",
        *(f"phase {index}: {_phase_text(phase, recipe)}" for index, phase in enumerate(recipe.phases)),
        f"in all {recipe.total_steps:,} steps, {human_count(total_tokens(recipe))} tokens",
        f"{recipe.precision}, ZeRO {recipe.zero}, {len(recipe.corpus.sources)} source(s), "
        f"warmup {recipe.schedule.warmup:,} steps, a checkpoint every {recipe.checkpoint.every.to_text()}",
    ]


def tokens_per_step(phase: RecipePhase, texts: int = 1) -> int:
    """Return the number of tokens of a step's batch after any warmup, as if all rows were full. `texts`: number of
    texts in a row (`Recipe.input.texts_per_row`)."""
    return phase.batch.tokens or (phase.batch.sequences or 0) * texts * phase.length


def with_vocab(model: ModelConfig, vocabulary_size: int | None = None) -> ModelConfig:
    """Return `model`; if it leaves the vocabulary's size to the tokenizer, with `vocabulary_size` or an assumed one."""
    return model if model.vocab else model.model_copy(update={"vocab": vocabulary_size or _ASSUMED_VOCABULARY})


def _size_text(recipe: Recipe) -> str:
    size = f"{human_count(parameter_count(recipe))} parameters"
    alone = discriminator_parameter_count(recipe)
    if alone is not None:
        size = f"{human_count(alone)} parameters, {size.removesuffix(' parameters')} with the generator"
    taught = teacher_parameter_count(recipe)
    if taught:
        size += f", taught by {human_count(taught)}"
    assumed = "" if recipe.model.vocab else f" (with {_ASSUMED_VOCABULARY:,} ids; the tokenizer decides)"
    scaled = f", muP from width {recipe.model.mup.hidden:,}" if recipe.model.mup else ""
    return size + assumed + scaled


def _phase_text(phase: RecipePhase, recipe: Recipe) -> str:
    rows = phase.batch.sequences
    cut = f"{rows // recipe.microbatch_rows(phase):,}" if rows else ""
    batch = f"{rows:,} rows in {cut} microbatches" if rows else "by tokens"
    if recipe.is_microbatch_automatic(phase):
        batch = f"{rows:,} rows" if rows else batch
        batch += ", in microbatches as large as memory permits"
    texts = recipe.input.texts_per_row
    tokens = human_count(tokens_per_step(phase, texts))
    length = f"rows of {phase.length}" if texts == 1 else f"rows of {texts} texts of {phase.length}"
    warmup = phase.batch.warmup
    rising = f", from {warmup.start:,} over {warmup.steps:,} steps" if warmup else ""
    return f"{phase.steps:,} steps of {tokens} tokens, {length}, {batch}{rising}"


def has_automatic_microbatch(recipe: Recipe) -> bool:
    """Return whether memory decides the size of microbatches in at least one phase."""
    return any(map(recipe.is_microbatch_automatic, recipe.phases))


def with_microbatch_rows(recipe: Recipe, ranks: int, max_rows: Sequence[int] | None = None) -> Recipe:
    """Return `recipe` with a number of rows in place of each phase's `microbatch: auto`.

    Args:
        ranks: number of ranks that share a step.
        max_rows: largest number of rows in a microbatch of each phase. None: no limit, so each rank computes its share
            of a step in one microbatch.
    """
    bounds = max_rows or [phase.rows_per_step for phase in recipe.phases]
    phases = (
        phase.model_copy(update={"microbatch": _even_rows(recipe, phase, ranks, bound)})
        if recipe.is_microbatch_automatic(phase)
        else phase
        for phase, bound in zip(recipe.phases, bounds, strict=True)
    )
    return recipe.model_copy(update={"phases": tuple(phases)})


def _even_rows(recipe: Recipe, phase: RecipePhase, ranks: int, max_rows: int) -> int:
    """Return the rows of a microbatch: a rank's share of a step, divided evenly, with `max_rows` rows at most."""
    rounds = -(-phase.rows_per_step // (ranks * max_rows))
    rows = -(-phase.rows_per_step // (ranks * rounds))
    # XLNet's memory is carried from microbatch to microbatch, so all have the same number of rows.
    if recipe.memory_refresh is not None:
        rows = max(size for size in range(1, rows + 1) if phase.rows_per_step % size == 0)
    return rows
