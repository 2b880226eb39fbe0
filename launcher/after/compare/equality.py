"""Finds what runs of a comparison have in common, and where they differ, section by section of their recipes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.after.compare.found import ComparisonState
from launcher.after.compare.plan import Arm
from launcher.output import human_count
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.summary import parameters
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import stream_spec

_SECTIONS = {
    "model": "the network",
    "start": "the weights that it begins with",
    "input": "how documents become rows",
    "mixing": "how sources are mixed",
    "shuffle": "the order of rows",
    "objective": "what is predicted",
    "phases": "steps, row length and batch",
    "optimizer": "the optimizer",
    "schedule": "the learning rate's course",
    "precision": "precision",
    "microbatch": "rows of a microbatch",
}
_OF_PHASES = {
    "objective": "objective",
    "mlm": "objective",
    "weights": "objective",
    "mixture": "mixing",
    "lr": "schedule",
    "schedule": "schedule",
    "rope_base": "model",
    "local_rope_base": "model",
}
"""The sections to which a phase's own settings belong; the others are of `phases`."""


@dataclass(frozen=True)
class Held:
    """A condition of a comparison, and whether it is equal for all recipes. `how`: the common value, or each
    recipe's."""

    what: str
    equal: bool
    how: str


def held(found: ComparisonState) -> list[Held]:
    """Return the conditions that must be equal for differences to come from the compared settings."""
    arms = found.comparison.arms
    lines = [
        _same("tokenizer", arms, [arm.inputs.tokenizer[:12] for arm in arms]),
        _same("documents", arms, [", ".join(_prints(arm)) for arm in arms]),
    ]
    rows = _rows(found)
    if rows is not None:
        lines.append(rows)
    lines += [
        _same("parameters", arms, [human_count(_parameters(arm)) for arm in arms]),
        _same("tokens", arms, [human_count(arm.cost.tokens(arm.recipe.total_steps)) for arm in arms]),
        _same("FLOPs", arms, [f"{arm.cost.flops(arm.recipe.total_steps):.4g}" for arm in arms]),
        _same("seeds", arms, [", ".join(map(str, found.comparison.seeds))] * len(arms)),
    ]
    return [*lines, *_sections(arms)]


def differences(first: Arm, other: Arm) -> list[str]:
    """Return each field of a run's identity that `other` has otherwise, `- key: first -> other`."""
    return identity.diff(_identity(first), _identity(other))


def _sections(arms: Sequence[Arm]) -> Iterator[Held]:
    fields = [_identity(arm) for arm in arms]
    for section, what in _SECTIONS.items():
        own = [{key: value for key, value in each.items() if _section(key) == section} for each in fields]
        equal = all(one == own[0] for one in own)
        keys = {key for one in own for key in identity.changed(own[0], one)}
        yield Held(what, equal, f"{section}" if equal else ", ".join(sorted(keys)))


def _section(path: str) -> str:
    """Return the section to which the field at `path` belongs."""
    section, *rest = path.split(".")
    return _OF_PHASES.get(rest[1], section) if section == "phases" and len(rest) > 1 else section


def _rows(found: ComparisonState) -> Held | None:
    """Return whether all runs of the first seed read the same rows in the same order, whatever is masked in them."""
    runs = [found.comparison.run(arm.label, found.comparison.seeds[0]) for arm in found.comparison.arms]
    there = [run for run in runs if run is not None]
    if len(there) < len(runs):
        return None
    read = [_read(run) for run in there]
    equal = all(one == read[0] for one in read)
    return Held(
        "rows and their order",
        equal,
        "every step reads the same" if equal else "the same documents, cut or batched otherwise",
    )


def _read(run: Run) -> list[object]:
    """Return all that decides which rows each step reads."""
    tokenizer = run.tokenizer()
    specs = [stream_spec(run, tokenizer, number) for number in range(len(run.recipe.phases))]
    batches = [(phase.steps, phase.length, phase.batch.model_dump()) for phase in run.recipe.phases]
    return [*(spec.model_dump(exclude={"masking"}) for spec in specs), *batches]


def _identity(arm: Arm) -> Mapping[str, object]:
    fields = identity.identity(arm.recipe)
    return {key: value for key, value in fields.items() if key != "seed"}


def _same(what: str, arms: Sequence[Arm], values: Sequence[str]) -> Held:
    if len(set(values)) == 1:
        return Held(what, True, values[0])
    return Held(
        what, False, "; ".join(f"{arm.label}: {value}" for arm, value in zip(arms, values, strict=True))
    )


def _prints(arm: Arm) -> list[str]:
    return sorted(print_[:12] for print_ in arm.inputs.corpora.values())


def _parameters(arm: Arm) -> int:
    return parameters(arm.recipe, arm.vocabulary)
