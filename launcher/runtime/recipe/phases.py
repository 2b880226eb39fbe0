"""The keys that a phase may set for all of its steps.

A `PhaseKey` describes one key: which value of the recipe it replaces, which recipes cannot have it, what it sets in the
model's layers, and how the timeline shows it.

`RecipePhase` (`schema.py`) defines the types of keys. `timeline.py` computes the values that change from step to step
within a phase (learning rate, batch, weights of terms).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from data_service.printable import escape_controls
from data_service.samples.lanes import Lanes
from encoder_core.families.catalogue import family_names_where
from launcher.runtime.recipe.phase_parts import ChangingRate, PhaseMlm
from launcher.runtime.recipe.schema import Recipe, RecipePhase

_MAX_SEARCHED_LAYERS = 1000  # layers searched for one that sees the whole row
_LISTED_SOURCES = 3  # largest number of sources with weight auto that the timeline names


@dataclass(frozen=True)
class PhaseKey:
    """A key of a phase.

    Attributes:
        name: name of the field in `RecipePhase`.
        title: title of the column in the timeline. The column is shown if at least one phase sets the key.
        value: function that returns the value in force in a phase, as plain data, whether or not the phase sets the
            key; None if the recipe has no such value.
        text: function that returns the same value as text, for a cell of the column.
        put: function that takes a recipe and a phase's value, and returns the recipe with this value.
        refusal: function that returns why a recipe cannot have the key, and the remedy; None if it can.
        in_layers: whether the value is a number that training sets in the layers, by the function under `name` in
            `encoder_core.train.loop.LAYER_SETTERS`.
    """

    name: str
    title: str
    value: Callable[[Recipe, RecipePhase], Any]
    text: Callable[[Recipe, RecipePhase], str]
    put: Callable[[Recipe, Any], Recipe] = lambda recipe, own: recipe
    refusal: Callable[[Recipe], tuple[str, str] | None] = lambda recipe: None
    in_layers: bool = False

    @property
    def record(self) -> str:
        """The name of the key in the machine-readable timeline."""
        return self.title.replace(" ", "_")

    def is_set(self, phase: RecipePhase) -> bool:
        return getattr(phase, self.name) is not None

    def is_used(self, recipe: Recipe) -> bool:
        return any(map(self.is_set, recipe.phases))


def recipe_in_phase(recipe: Recipe, phase: RecipePhase) -> Recipe:
    """Return `recipe` with the values of a phase in place of its own."""
    for key in PHASE_KEYS:
        if key.is_set(phase):
            recipe = key.put(recipe, getattr(phase, key.name))
    return recipe


def layer_settings(recipe: Recipe, phase: RecipePhase) -> dict[str, float]:
    """Return the values that training sets in the layers in a phase, by key, for keys that at least one phase sets."""
    used = (key for key in PHASE_KEYS if key.in_layers and key.is_used(recipe))
    return {key.name: key.value(recipe, phase) for key in used}


def layer_phase_key(
    name: str,
    title: str,
    value: Callable[[Recipe], float | None],
    put: Callable[[Recipe, float], Recipe],
    refusal: Callable[[Recipe], tuple[str, str] | None],
) -> PhaseKey:
    """Return a key whose value is a number that training sets in the layers. `value`: function that reads the number
    from a recipe to which the phase's settings are applied (`recipe_in_phase`)."""

    return PhaseKey(
        name=name,
        title=title,
        value=lambda recipe, phase: value(recipe_in_phase(recipe, phase)),
        text=lambda recipe, phase: f"{value(recipe_in_phase(recipe, phase)):g}",
        put=put,
        refusal=refusal,
        in_layers=True,
    )


def is_staged(recipe: Recipe) -> bool:
    """Return whether each phase continues the sources where the phase before it stopped."""
    return any(phase.mixture is not None for phase in recipe.phases)


def planned_steps(phase: RecipePhase) -> int:
    """Return the number of steps for which the data of a phase are planned (`PhaseMixture.steps`)."""
    return (phase.mixture and phase.mixture.steps) or phase.steps


def source_shares(recipe: Recipe, phase: RecipePhase) -> dict[str, float | None] | None:
    """Return each source's share of a phase's tokens. A share is None if it follows from the corpora's sizes; the
    result is None if neither the phase nor the corpus sets weights."""
    weights = {name: source.weight for name, source in recipe.corpus.sources.items()}
    if phase.mixture is not None and phase.mixture.weights is not None:
        weights = {name: phase.mixture.weights.get(name, 0.0) for name in weights}
    elif "auto" in weights.values():
        return None
    numbers = {name: weight for name, weight in weights.items() if weight != "auto"}
    total = sum(numbers.values()) if len(numbers) == len(weights) else 1.0
    return {name: numbers[name] / total if name in numbers else None for name in weights}


def source_temperature(recipe: Recipe, phase: RecipePhase) -> float:
    """Return the temperature by which the sources with weight auto are mixed in a phase."""
    return (phase.mixture and phase.mixture.temperature) or recipe.mixing.temperature


def _why_no_mixture(recipe: Recipe) -> tuple[str, str] | None:
    apart = "rows that continue from step to step" if isinstance(recipe.input, Lanes) else ""
    apart = "batches of one source" if recipe.mixing.batches == "one_source" else apart
    if not apart:
        return None
    return (
        f"{apart} read the same share of each source in every phase",
        "remove mixture from the phase, and set the weights in corpus.sources",
    )


def _with_corpora(recipe: Recipe, phase_corpora: Mapping[str, str]) -> Recipe:
    sources = {
        name: source.model_copy(update={"uri": phase_corpora.get(name, source.uri)})
        for name, source in recipe.corpus.sources.items()
    }
    return recipe.model_copy(update={"corpus": recipe.corpus.model_copy(update={"sources": sources})})


def _why_no_phase_corpora(recipe: Recipe) -> tuple[str, str] | None:
    if not is_staged(recipe):
        return None
    return (
        "phases with a mixture continue each source where the phase before it stopped, and no corpus can be continued "
        "in another",
        "remove corpora from the phase; give the recipe both corpora as sources, and mixture.weights to the phases",
    )


def _sources_text(recipe: Recipe, phase: RecipePhase) -> str:
    """Return as text each source's share of the tokens, and how often a source may be read by the phase's end."""
    shares, temperature = source_shares(recipe, phase), source_temperature(recipe, phase)
    by_size = "by size" if temperature == 1 else f"by size^(1/{temperature:.3g})"
    given = [by_size]
    if shares is not None:
        given = [f"{share:.3g} {name}" for name, share in shares.items() if share]
        drawn = [name for name, share in shares.items() if share is None]
        named = ", ".join(drawn) if len(drawn) <= _LISTED_SOURCES else f"{len(drawn)} others"
        given += [f"{named} {by_size}"] if drawn else []
    most = phase.mixture and phase.mixture.most_readings
    return escape_controls(", ".join(given)) + (f", read {most:g} times at most" if most else "")


def _rope_base(recipe: Recipe) -> float | None:
    """Return the rotary base of layers that see the whole row; None if the model has no rotary positions. If a small
    model has only layers with windows, return the base that a deeper layer without a window would have."""
    model = recipe.model
    return model.rope_base(next((layer for layer in range(_MAX_SEARCHED_LAYERS) if model.window(layer) is None), 0))


def _with_rope_base(recipe: Recipe, base: float) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.with_rope_base(base)})


# Names of the families with rotary positions, and of those whose layers with windows have a rotary base of their own.
_ROTARY_FAMILIES = family_names_where(lambda family: family.has_rotary_positions)
_LOCAL_FAMILIES = family_names_where(lambda family: "local_rope_base" in family.model_fields)


def _why_no_rope_base(recipe: Recipe) -> tuple[str, str] | None:
    if recipe.model.has_rotary_positions:
        return None
    return (
        f"a model of family {recipe.model.family} has no rotary positions",
        f"remove rope_base from the phase, or train a family with rotary positions: {_ROTARY_FAMILIES}",
    )


def _local_rope_base(recipe: Recipe) -> float | None:
    """Return the rotary base of layers that see a window; None if the model has no such layers."""
    model = recipe.model
    local = (layer for layer in range(model.layers) if model.window(layer) is not None)
    return next(map(model.rope_base, local), None)


def _with_local_rope_base(recipe: Recipe, base: float) -> Recipe:
    if _local_rope_base(recipe) is None:
        return recipe  # `_why_no_local_rope_base` refuses such a recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"local_rope_base": base})})


def _why_no_local_rope_base(recipe: Recipe) -> tuple[str, str] | None:
    if _local_rope_base(recipe) is not None:
        return None
    return (
        f"this model of family {recipe.model.family} has no local layers with rotary positions",
        f"remove local_rope_base, or train a family with such layers (model.local_attention): {_LOCAL_FAMILIES}",
    )


def _with_objective(recipe: Recipe, term: str) -> Recipe:
    return recipe.model_copy(update={"objective": recipe.objective.for_rows(causal=term == "clm")})


def _why_no_phase_objective(recipe: Recipe) -> tuple[str, str] | None:
    if recipe.objective.clm is not None and recipe.objective.mlm is not None:
        return None
    return (
        "a phase chooses between clm and mlm, and the objective does not have both",
        "remove objective from the phase, or set objective.clm and objective.mlm",
    )


def _trained_term(recipe: Recipe, phase: RecipePhase) -> str | None:
    """Return which of clm and mlm the phase trains; None if the objective does not have both."""
    return None if recipe.objective.clm is None or recipe.objective.mlm is None else phase.objective


def _with_masks(recipe: Recipe, own: PhaseMlm) -> Recipe:
    if recipe.objective.mlm is None:
        return recipe  # `_why_no_phase_masks` refuses such a recipe
    changes = {name: value for name, value in own if value is not None} | (
        {"rate": own.highest_rate} if own.rate else {}
    )
    masks = recipe.objective.mlm.model_copy(update=changes)
    return recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"mlm": masks})})


def _why_no_phase_masks(recipe: Recipe) -> tuple[str, str] | None:
    if recipe.objective.mlm is not None:
        return None
    return (
        "the phase changes the masks of mlm, but the objective has no mlm",
        "remove mlm from the phase, or set objective.mlm",
    )


def _mask_values(recipe: Recipe, phase: RecipePhase) -> Mapping[str, object] | None:
    mlm, changing = recipe_in_phase(recipe, phase).objective.mlm, changing_rate(phase)
    if mlm is None:
        return None
    rate = mlm.rate if changing is None else changing.model_dump()
    return {"rate": rate, **mlm.replace.model_dump()}


def changing_rate(phase: RecipePhase) -> ChangingRate | None:
    """Return the masking rate if it changes within the phase, else None."""
    rate = None if phase.mlm is None else phase.mlm.rate
    return rate if isinstance(rate, ChangingRate) else None


def _masks_text(recipe: Recipe, phase: RecipePhase) -> str:
    """Return as text the masking rate, and the share of each kind of replacement."""
    mlm = recipe_in_phase(recipe, phase).objective.mlm
    if mlm is None:  # the phase trains clm
        return "none"
    replace = mlm.replace
    unit = "" if mlm.unit == "token" else f" by {mlm.unit}"
    shares = {"mask": replace.mask, **replace.word_shares, "random": replace.random, "kept": replace.keep}
    changing = changing_rate(phase)
    rate = f"{mlm.rate:.3g}" if changing is None else f"{changing.start:.3g} to {changing.end:.3g}"
    return f"{rate}{unit}: {', '.join(f'{share:g} {name}' for name, share in shares.items())}"


# The keys are in the order of the timeline's columns.
PHASE_KEYS: tuple[PhaseKey, ...] = (
    PhaseKey(
        name="microbatch",
        title="microbatch",
        value=Recipe.microbatch_rows,
        text=lambda recipe, phase: str(recipe.microbatch_rows(phase)),
        put=lambda recipe, own: recipe.model_copy(update={"microbatch": own}),
    ),
    PhaseKey(
        name="mixture",
        title="sources",
        value=lambda recipe, phase: source_shares(recipe, phase) if is_staged(recipe) else None,
        text=_sources_text,
        refusal=_why_no_mixture,
    ),
    PhaseKey(
        name="corpora",
        title="corpora",
        value=lambda recipe, phase: phase.corpora,
        text=lambda recipe, phase: escape_controls(
            ", ".join(f"{name}: {uri}" for name, uri in (phase.corpora or {}).items()) or "the sources' own"
        ),
        put=_with_corpora,
        refusal=_why_no_phase_corpora,
    ),
    PhaseKey(
        name="objective",
        title="objective",
        value=_trained_term,
        text=lambda recipe, phase: str(_trained_term(recipe, phase)),
        put=_with_objective,
        refusal=_why_no_phase_objective,
    ),
    layer_phase_key("rope_base", "rope base", _rope_base, _with_rope_base, _why_no_rope_base),
    layer_phase_key(
        "local_rope_base",
        "local rope base",
        _local_rope_base,
        _with_local_rope_base,
        _why_no_local_rope_base,
    ),
    PhaseKey(
        name="mlm",
        title="masks",
        value=_mask_values,
        text=_masks_text,
        put=_with_masks,
        refusal=_why_no_phase_masks,
    ),
)
