"""What a recipe comes to, in figures: model size, batches, tokens."""

from launcher.human import human_count
from launcher.objective import meta_module, parameter_count
from launcher.recipe import Phase, Recipe

_ASSUMED_VOCABULARY = 50_265  # for counting only, where the recipe leaves it to the tokenizer


def parameters(recipe: Recipe) -> int:
    """Trainable parameters of all networks, tied ones once; built on the meta device, so no memory is used."""
    model = recipe.model
    known = model if model.vocab else model.model_copy(update={"vocab": _ASSUMED_VOCABULARY})
    return parameter_count(meta_module(known, recipe.objective))


def summary(recipe: Recipe) -> list[str]:
    """Lines for a person."""
    assumed = "" if recipe.model.vocab else f" (with {_ASSUMED_VOCABULARY:,} ids; the tokenizer decides)"
    total = sum(phase.steps * tokens_per_step(phase) for phase in recipe.phases)
    return [
        f"{recipe.name}: {recipe.model.family}, {human_count(parameters(recipe))} parameters{assumed}",
        *(f"phase {index}: {_phase(phase, recipe)}" for index, phase in enumerate(recipe.phases)),
        f"in all {recipe.total_steps:,} steps, {human_count(total)} tokens",
        f"{recipe.precision}, ZeRO {recipe.zero}, {len(recipe.corpus.sources)} source(s), "
        f"warmup {recipe.schedule.warmup:,} steps",
    ]


def tokens_per_step(phase: Phase) -> int:
    """Tokens of a step's batch, rows taken as full."""
    return phase.batch.tokens or (phase.batch.sequences or 0) * phase.length


def _phase(phase: Phase, recipe: Recipe) -> str:
    rows = phase.batch.sequences
    batch = f"{rows:,} rows in {rows // recipe.microbatch:,} microbatches" if rows else "by tokens"
    tokens = human_count(tokens_per_step(phase))
    return f"{phase.steps:,} steps of {tokens} tokens, rows of {phase.length}, {batch}"
