"""`maskfleet estimate RECIPE --measure`: measures a recipe's steps on this machine, and predicts the whole run from
them.

Each phase is measured by one process a rank. If a step smaller than the recipe's own was measured, the recipe's step
is scaled up from its parts. The time of microbatches grows with their FLOPs and their number; what happens once a
step grows with the number of parameters.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from data_service.corpus.manifest import PairTexts
from data_service.processes import temporary_folder
from data_service.samples.packing import EDGE_TOKENS
from data_service.samples.pairs import Translations
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.store.open import open_store
from launcher.plan.estimate.roofline import step_share
from launcher.plan.measure.processes import RankCommand, run_ranks
from launcher.plan.measure.requests import Measured, MeasureRequest, Step, read_taken
from launcher.plan.measure.rows import RandomText, first_ordinary, random_tokenizer, write_corpus
from launcher.plan.measure.trial import Machine, Trial, choose, expected_seconds, settled_here, this_machine
from launcher.runtime.capacity.devices import AssumedUtilisation, Cluster, Gpu
from launcher.runtime.capacity.workload import executed, microbatch_shape, phase_targets
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import known, parameters
from launcher.runtime.run.create import create_run
from launcher.runtime.run.inputs import read_inputs

_BLOCK_TOKENS = 500_000
_BATCHES = 8  # at least so many in an epoch


@dataclass(frozen=True)
class MeasuredPhase:
    """One phase of a recipe as measured on this machine.

    Attributes:
        phase: the phase as the recipe has it.
        trial: the possibly smaller phase that was measured.
        step: figures of the first rank, each the median over the timed steps.
        low, high: seconds of the shortest and of the longest step.
        steps: number of timed steps.
        peak_bytes: memory of the rank that filled most.
        peak_flops: peak FLOP/s of a rank's device; None if unknown.
        mfu: median MFU over the steps; None without `peak_flops`.
        exchange: share of a step that collectives take.
        operators: the slowest operators, each with its share of the time.
        whole: seconds of the recipe's own step on this machine.
        estimated: the same by the utilisation that `estimate` would have assumed; None without `peak_flops`.
    """

    phase: RecipePhase
    trial: Trial
    step: Step
    low: float
    high: float
    steps: int
    peak_bytes: int
    peak_flops: float | None
    mfu: float | None
    exchange: float
    operators: tuple[tuple[str, float], ...]
    whole: float
    estimated: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens / self.step.seconds

    @property
    def other(self) -> float:
        """Seconds of a step outside its parts: signals and sums between ranks, and Python."""
        step = self.step
        return max(0.0, step.seconds - step.data - step.forward - step.backward - step.update)


@dataclass(frozen=True)
class MeasuredRecipe:
    """All phases of a recipe as measured on a machine.

    Attributes:
        parameters: number of parameters of all networks, with the vocabulary that was assumed.
    """

    recipe: Recipe
    machine: Machine
    parameters: int
    phases: tuple[MeasuredPhase, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole run on this machine without interruptions."""
        return sum(found.phase.steps * found.whole for found in self.phases)

    @property
    def estimated(self) -> float | None:
        """The same seconds as estimated before measuring. None if the device's peak is unknown."""
        seconds = [found.estimated for found in self.phases]
        if any(each is None for each in seconds):
            return None
        return sum(
            found.phase.steps * (each or 0.0) for found, each in zip(self.phases, seconds, strict=True)
        )


def measure(recipe: Recipe, note: Callable[[str], None]) -> MeasuredRecipe:
    """Measure every phase of `recipe` on every device of this machine. `note` is called with a text before each
    measurement.

    Raises:
        EstimateError: not even one row fits into memory, or a rank failed.
    """
    machine = this_machine(recipe)
    recipe = settled_here(recipe, machine)
    found: dict[tuple[int, int, int], MeasuredPhase] = {}
    phases = []
    for phase in recipe.phases:
        # Phases that compute the same are measured once.
        key = (phase.length, phase.rows, phase_targets(recipe, phase))
        if key not in found:
            trial = choose(recipe, phase, machine)
            note(announcement(phase, trial, machine))
            found[key] = _measured(recipe, phase, machine, trial, _run(trial, machine))
        phases.append(replace(found[key], phase=phase))
    return MeasuredRecipe(recipe, machine, parameters(recipe), tuple(phases))


def utilisations(report: MeasuredRecipe, cluster: Cluster) -> list[AssumedUtilisation]:
    """Return the utilisation of each phase that `estimate` shall use for `cluster`; empty if no GPU was measured.

    For this very machine it is that of the measured steps. For other clusters of the same GPU it is the share of the
    peak that computation alone reached here; the network is then estimated. For other GPUs it is the assumed share,
    times the ratio of measured to assumed share on this machine.
    """
    machine = report.machine
    if machine.gpu is None or machine.peak is None:
        return []
    if cluster.gpu != machine.gpu:
        return [_elsewhere(report.recipe, found, machine.gpu, cluster.gpu) for found in report.phases]
    here = (cluster.nodes, cluster.ranks) == (1, machine.ranks)
    return [_utilisation(report.recipe, found, machine.peak, here=here) for found in report.phases]


def _utilisation(recipe: Recipe, found: MeasuredPhase, peak: float, *, here: bool) -> AssumedUtilisation:
    trial = found.trial
    if here:
        share = trial.whole * _executed(_of(recipe, found.phase)) / (peak * found.whole)
        return AssumedUtilisation(share, "measured here", measured=True, step=found.whole)
    return AssumedUtilisation(
        _reached(found, peak), "measured here, exchange between ranks apart", measured=True
    )


def _reached(found: MeasuredPhase, peak: float) -> float:
    """Return the share of a device's peak that computation alone reached."""
    computing = max(1e-9, found.step.seconds * (1 - found.exchange) - found.step.data)
    return found.trial.rounds * _executed(found.trial.recipe) / (peak * computing)


def correction(found: MeasuredPhase, gpu: Gpu) -> float:
    """Return the share of the peak that was measured for a phase on `gpu`, divided by the share assumed for the same
    microbatches.
    """
    recipe = found.trial.recipe
    peak = gpu.peak if recipe.precision == "bf16" else gpu.peak_fp32
    return _reached(found, peak) / _assumed(recipe, gpu, found.trial.rounds)


def _assumed(recipe: Recipe, gpu: Gpu, rounds: int) -> float:
    return step_share(recipe, microbatch_shape(recipe, recipe.phases[0]), gpu, rounds)


def _elsewhere(recipe: Recipe, found: MeasuredPhase, here: Gpu, there: Gpu) -> AssumedUtilisation:
    ratio = correction(found, here)
    share = min(1.0, ratio * _assumed(_of(recipe, found.phase), there, found.trial.whole))
    return AssumedUtilisation(
        share, f"what is assumed of a {there.name} x {ratio:.2f}, as found on a {here.name}"
    )


def announcement(phase: RecipePhase, trial: Trial, machine: Machine) -> str:
    """Return a text for the user: what is measured, and why no more than that."""
    what = f"measuring rows of {phase.length} on {machine.ranks} rank(s)"
    seconds = "" if trial.seconds is None else f", about {trial.seconds:.2g} s a step expected"
    if not trial.smaller:
        return f"{what}, microbatches of {trial.recipe.microbatch}{seconds}"
    smaller = " and ".join(trial.smaller)
    return f"{what}: the recipe's own would not fit into memory or take too long here, so {smaller}{seconds}"


def _measured(
    recipe: Recipe, phase: RecipePhase, machine: Machine, trial: Trial, ranks: Sequence[Measured]
) -> MeasuredPhase:
    first = ranks[0]
    seconds = [step.seconds for step in first.steps]
    step = _median(first.steps)
    estimated = expected_seconds(_of(recipe, phase), machine, trial.whole)
    return MeasuredPhase(
        phase=phase,
        trial=trial,
        step=step,
        low=min(seconds),
        high=max(seconds),
        steps=len(seconds),
        peak_bytes=max(taken.peak_bytes for taken in ranks),
        peak_flops=first.peak_flops,
        mfu=statistics.median(first.mfu) if first.mfu else None,
        exchange=first.exchange,
        operators=first.operators,
        whole=whole_step(recipe, phase, trial, step),
        estimated=estimated,
    )


def whole_step(recipe: Recipe, phase: RecipePhase, trial: Trial, step: Step) -> float:
    """Return the seconds of the recipe's own step on as many ranks, scaled from the trial's step."""
    if not trial.smaller and trial.rounds == trial.whole:
        return step.seconds
    own = _of(recipe, phase)
    flops = _executed(own) / _executed(trial.recipe)
    size = parameters(own) / parameters(trial.recipe)
    # At ZeRO 0 and 1 gradients are exchanged in the last backward pass of a step, else in each.
    others = trial.rounds - 1
    each = (step.backward - step.last) / others if others else step.backward
    once = max(0.0, step.last - each) if others and recipe.zero < 2 else 0.0
    computing = trial.whole * flops * ((step.forward + step.backward - once) / trial.rounds)
    rest = max(0.0, step.seconds - step.data - step.forward - step.backward)
    return computing + size * (once + rest) + step.data


def _of(recipe: Recipe, phase: RecipePhase) -> Recipe:
    """Return `recipe` with this phase only and a known vocabulary. Its sources are synthetic, so it has no mixture."""
    alone = phase.model_copy(update={"mixture": None})
    return recipe.model_copy(update={"model": known(recipe.model), "phases": (alone,)})


def _executed(recipe: Recipe) -> int:
    """Return the FLOPs that are executed for a microbatch."""
    return executed(recipe, microbatch_shape(recipe, recipe.phases[0]))


def _median(steps: Sequence[Step]) -> Step:
    """Return the median of each figure by itself."""
    middle = {name: statistics.median(getattr(step, name) for step in steps) for name in vars(steps[0])}
    return Step(**middle | {"tokens": round(middle["tokens"])})


def _run(trial: Trial, machine: Machine) -> list[Measured]:
    """Run the trial on all ranks in a temporary folder, and return the result of each."""
    with temporary_folder("measure") as folder:
        run = prepare(trial, str(folder))
        orders = [
            MeasureRequest(
                run=run,
                rank=rank,
                world=machine.ranks,
                device="cuda" if machine.device == "cuda" else "cpu",
                threads=machine.threads,
                meeting=f"{folder}/meet",
                result=f"{folder}/rank{rank}.json",
            )
            for rank in range(machine.ranks)
        ]
        run_ranks([_command(order, folder) for order in orders])
        return [read_taken(Path(order.result)) for order in orders]


def _command(order: MeasureRequest, folder: Path) -> RankCommand:
    place = {"RANK": order.rank, "LOCAL_RANK": order.rank, "WORLD_SIZE": order.world}  # DeepSpeed insists
    return RankCommand(
        words=[sys.executable, "-P", "-m", "launcher.plan.measure.steps", order.model_dump_json()],
        environment={name: str(value) for name, value in place.items()},
        log=folder / f"rank{order.rank}.log",
    )


def prepare(trial: Trial, folder: str) -> str:
    """Create a run of the trial's recipe on synthetic rows below `folder`, and return its URI."""
    recipe = trial.recipe
    corpus, vocabulary = f"{folder}/corpus", recipe.model.vocabulary
    batch = recipe.phases[0].rows * recipe.phases[0].length * recipe.input.texts
    blocks = 1 + _BATCHES * batch // _BLOCK_TOKENS
    tokenizer = random_tokenizer(vocabulary)
    text = _text(recipe, vocabulary)
    write_corpus(open_store(corpus), blocks, text, vocabulary=vocabulary, tokenizer=tokenizer)
    uri = f"{folder}/run"
    create_run(trial.at(corpus, f"{corpus}/tokenizer"), uri, datetime.now(UTC), read_inputs)
    return uri


def _text(recipe: Recipe, vocabulary: int) -> RandomText:
    """Return text that fills the rows: where a row holds whole texts, each is as long as the row permits."""
    ids, full = range(first_ordinary(), vocabulary), recipe.phases[0].length - EDGE_TOKENS
    match recipe.input:
        case TextPairs(negatives=negatives):
            return RandomText(ids, _BLOCK_TOKENS, PairTexts(negatives), full)
        case Translations():
            each = (recipe.phases[0].length - 2 * EDGE_TOKENS) // 2
            return RandomText(ids, _BLOCK_TOKENS, PairTexts(0), each)
        case RepeatedSentences():
            return RandomText(ids, _BLOCK_TOKENS, None, full)
        case _:
            return RandomText(ids, _BLOCK_TOKENS)
