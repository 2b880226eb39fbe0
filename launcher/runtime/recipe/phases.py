"""The keys that a phase sets for all of its steps, each told in one place: what it takes the place of in the recipe,
which recipes cannot have it, what it sets in the model's layers, and how the timeline shows it.

`RecipePhase` (`schema.py`) has their types. What changes from step to step within a phase (learning rate, batch,
weights of terms) is in `timeline.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_service.printable import visible
from data_service.samples.lanes import Lanes
from encoder_core.families.catalogue import FAMILIES
from encoder_core.families.pre_norm import PreNormConfig
from launcher.runtime.recipe.schema import PhaseMlm, Recipe, RecipePhase

Curves = Iterator[tuple[str, list[float]]]


@dataclass(frozen=True)
class PhaseKey:
    """A key of a phase.

    Attributes:
        name: of its field in `RecipePhase`.
        title: of its column in the timeline, which has one if some phase sets the key.
        record: its name in the timeline for programs.
        value: what holds in a phase that may set the key or not, as plain data; None if there is nothing of the kind.
        text: the same in a cell of the column.
        put: (recipe, the phase's value) -> the recipe with that value in place of its own.
        refusal: why a recipe cannot have the key, and the remedy; None if it can.
        in_layers: in training `encoder_core.train.loop.SETTERS` sets the layers to the value, a number, under `name`.
        curves: titles and values of curves below the timeline, given the phases of some steps.
    """

    name: str
    title: str
    record: str
    value: Callable[[Recipe, RecipePhase], Any]
    text: Callable[[Recipe, RecipePhase], str]
    put: Callable[[Recipe, Any], Recipe] = lambda recipe, own: recipe
    refusal: Callable[[Recipe], tuple[str, str] | None] = lambda recipe: None
    in_layers: bool = False
    curves: Callable[[Recipe, Sequence[RecipePhase]], Curves] = lambda recipe, phases: iter(())

    def is_set(self, phase: RecipePhase) -> bool:
        return getattr(phase, self.name) is not None

    def is_used(self, recipe: Recipe) -> bool:
        return any(map(self.is_set, recipe.phases))


def during(recipe: Recipe, phase: RecipePhase) -> Recipe:
    """`recipe` with the values of a phase in place of its own."""
    for key in KEYS:
        if key.is_set(phase):
            recipe = key.put(recipe, getattr(phase, key.name))
    return recipe


def layer_settings(recipe: Recipe, phase: RecipePhase) -> dict[str, float]:
    """Return what layers are set to in a phase, by the names of the keys that some phase sets."""
    used = (key for key in KEYS if key.in_layers and key.is_used(recipe))
    return {key.name: key.value(recipe, phase) for key in used}


def layer_key(
    name: str,
    title: str,
    value: Callable[[Recipe], float | None],
    put: Callable[[Recipe, float], Recipe],
    refusal: Callable[[Recipe], tuple[str, str] | None],
) -> PhaseKey:
    """A key whose value is a number that layers are set to. `value`: of a recipe that has the phase's in place."""

    def curves(recipe: Recipe, phases: Sequence[RecipePhase]) -> Curves:
        values = [value(during(recipe, phase)) or 0.0 for phase in phases]
        yield f"{title}, up to {max(values):g}", values

    return PhaseKey(
        name=name,
        title=title,
        record=name,
        value=lambda recipe, phase: value(during(recipe, phase)),
        text=lambda recipe, phase: f"{value(during(recipe, phase)):g}",
        put=put,
        refusal=refusal,
        in_layers=True,
        curves=curves,
    )


def is_staged(recipe: Recipe) -> bool:
    """Return whether its sources are read on from phase to phase."""
    return any(phase.mixture is not None for phase in recipe.phases)


def planned_steps(phase: RecipePhase) -> int:
    """Steps that the data of a phase are planned for, where sources are read on from phase to phase."""
    return (phase.mixture and phase.mixture.steps) or phase.steps


def source_shares(recipe: Recipe, phase: RecipePhase) -> dict[str, float] | None:
    """Return the share of each source in the tokens of a phase; None if it is the corpora's sizes that decide."""
    given = {name: source.weight for name, source in recipe.corpus.sources.items()}
    weights = {name: weight for name, weight in given.items() if weight != "auto"}
    if phase.mixture is not None and phase.mixture.weights is not None:
        weights = {name: phase.mixture.weights.get(name, 0.0) for name in given}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} or None


def _no_mixture(recipe: Recipe) -> tuple[str, str] | None:
    apart = "rows that go on from step to step" if isinstance(recipe.input, Lanes) else ""
    apart = "batches of one source" if recipe.mixing.batches == "one_source" else apart
    if not apart:
        return None
    return (
        f"{apart} take as many of each source in every phase",
        "leave it out, and give the sources of the corpus their weights",
    )


def _sources(recipe: Recipe, phase: RecipePhase) -> str:
    """Shares of the tokens, and how often each source may have been read by the end."""
    shares = source_shares(recipe, phase)
    given = (
        "by size"
        if shares is None
        else ", ".join(f"{share:.3g} {name}" for name, share in shares.items() if share)
    )
    most = phase.mixture and phase.mixture.most_readings
    return visible(given) + (f", read {most:g} times at most" if most else "")


def _share_curves(recipe: Recipe, phases: Sequence[RecipePhase]) -> Curves:
    shares = [source_shares(recipe, phase) for phase in phases]
    known = [found for found in shares if found is not None]
    for name in recipe.corpus.sources if known else ():
        values = [0.0 if found is None else found[name] for found in shares]
        if max(values) > 0:
            unknown = "; none: by size" if len(known) < len(shares) else ""
            yield f"share of {visible(name)}, up to {max(values):.3g}{unknown}", values


def _rope_base(recipe: Recipe) -> float | None:
    """Of layers that see the whole row. Layer 0 is one of them in every family."""
    return recipe.model.rope_base(0) if isinstance(recipe.model, PreNormConfig) else None


def _with_rope_base(recipe: Recipe, base: float) -> Recipe:
    if not isinstance(recipe.model, PreNormConfig):
        return recipe  # it is refused
    return recipe.model_copy(update={"model": recipe.model.with_rope_base(base)})


_TURNED = " or ".join(
    its.model_fields["family"].default for its in FAMILIES if issubclass(its, PreNormConfig)
)


def _no_rotation(recipe: Recipe) -> tuple[str, str] | None:
    if isinstance(recipe.model, PreNormConfig):
        return None
    return (
        f"a model of family {recipe.model.family} has no rotary positions",
        f"leave it out, or train a family that has them: {_TURNED}",
    )


def _with_masks(recipe: Recipe, own: PhaseMlm) -> Recipe:
    if recipe.objective.mlm is None:
        return recipe  # it is refused
    changes = {name: value for name, value in own if value is not None}
    masks = recipe.objective.mlm.model_copy(update=changes)
    return recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"mlm": masks})})


def _no_masks(recipe: Recipe) -> tuple[str, str] | None:
    if recipe.objective.mlm is not None:
        return None
    return (
        "the phase changes the masks of mlm, which is not the objective",
        "leave it out, or train objective.mlm",
    )


def _masks(recipe: Recipe, phase: RecipePhase) -> Mapping[str, object] | None:
    mlm = during(recipe, phase).objective.mlm
    return None if mlm is None else {"rate": mlm.rate, **mlm.replace.model_dump()}


def _masks_text(recipe: Recipe, phase: RecipePhase) -> str:
    """Of the tokens, and of these what stands in their place."""
    mlm = during(recipe, phase).objective.mlm
    assert mlm is not None  # a phase changes the masks of mlm only
    replace = mlm.replace
    unit = "" if mlm.unit == "token" else f" by {mlm.unit}"
    shares = {"mask": replace.mask, **replace.of_words, "random": replace.random, "kept": replace.keep}
    return f"{mlm.rate:.3g}{unit}: {', '.join(f'{share:g} {name}' for name, share in shares.items())}"


# In the order of the timeline's columns.
KEYS: tuple[PhaseKey, ...] = (
    PhaseKey(
        name="microbatch",
        title="microbatch",
        record="microbatch",
        value=Recipe.microbatch_of,
        text=lambda recipe, phase: str(recipe.microbatch_of(phase)),
        put=lambda recipe, own: recipe.model_copy(update={"microbatch": own}),
    ),
    PhaseKey(
        name="mixture",
        title="sources",
        record="sources",
        value=lambda recipe, phase: source_shares(recipe, phase) if is_staged(recipe) else None,
        text=_sources,
        refusal=_no_mixture,
        curves=_share_curves,
    ),
    layer_key("rope_base", "rope base", _rope_base, _with_rope_base, _no_rotation),
    PhaseKey(
        name="mlm",
        title="masks",
        record="masks",
        value=_masks,
        text=_masks_text,
        put=_with_masks,
        refusal=_no_masks,
    ),
)
