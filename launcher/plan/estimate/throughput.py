"""How long a step takes: FLOPs over what the GPUs are assumed to reach, and the network after it."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from encoder_core.cost.products import Count, Shape
from encoder_core.optim.muon import flops as orthogonalisation_flops
from launcher.runtime.capacity.devices import LINK_SHARE, AssumedUtilisation, Cluster
from launcher.runtime.capacity.workload import executed, microbatch_flops, microbatch_shape
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import momentum_matrices
from launcher.runtime.recipe.timeline import step_batches


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a recipe on a cluster; rows taken as full.

    Attributes:
        steps, rows, length: of the phase; rows of one step, each text of an example counted as one.
        shape: one microbatch.
        microbatches: of one step; `rounds` of them on the rank that has most.
        flops: of one microbatch.
        utilisation: assumed or measured.
        orthogonalising: FLOPs of a step on one rank, in bfloat16: Muon's.
        compute, optimizer, network: seconds of a step; `optimizer` those of orthogonalising, 0 where the step was
            measured.
        spared: seconds that the steps of a rising batch take less than those after it, all together.
    """

    steps: int
    rows: int
    length: int
    shape: Shape
    microbatches: int
    rounds: int
    flops: Count
    utilisation: AssumedUtilisation
    orthogonalising: float
    compute: float
    optimizer: float
    network: float
    spared: float

    @property
    def step(self) -> float:
        """Seconds; nothing of the network is taken to be hidden behind the computation."""
        return self.compute + self.optimizer + self.network

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.length / self.step

    @property
    def seconds(self) -> float:
        """Of the whole phase, undisturbed."""
        return self.steps * self.step - self.spared


def phase_time(
    recipe: Recipe, phase: RecipePhase, cluster: Cluster, parameters: int, utilisation: AssumedUtilisation
) -> PhaseTime:
    """`parameters` of all networks."""
    rows, shape = phase.rows, microbatch_shape(recipe, phase)
    flops = microbatch_flops(recipe, shape)
    microbatches = -(-rows // recipe.microbatch_of(phase))
    rounds = -(-microbatches // cluster.ranks)
    done = executed(recipe, shape)
    rising = _fewer_rounds(recipe, phase, cluster, rounds)
    peak = cluster.gpu.peak if recipe.precision == "bf16" else cluster.gpu.peak_fp32
    moved = {fewer: network_bytes(parameters, cluster.ranks, recipe, fewer) for fewer in {rounds, *rising}}
    matrices = sum(orthogonalisation_flops(shape) for shape in momentum_matrices(recipe))
    orthogonalising = matrices / (cluster.ranks if recipe.zero else 1)  # at stage 0 every rank does all
    measured = utilisation.step is not None
    compute = rounds * done / (peak * utilisation.share) if utilisation.step is None else utilisation.step
    sending = {
        fewer: 0.0 if measured else sent / (LINK_SHARE * cluster.rate) for fewer, sent in moved.items()
    }
    return PhaseTime(
        steps=phase.steps,
        rows=rows * recipe.input.texts,
        length=phase.length,
        shape=shape,
        microbatches=microbatches,
        rounds=rounds,
        flops=flops,
        utilisation=utilisation,
        orthogonalising=orthogonalising,
        compute=compute,
        optimizer=0.0 if measured else orthogonalising / (cluster.gpu.peak * utilisation.share),
        network=sending[rounds],
        spared=sum(
            steps * (compute * (1 - fewer / rounds) + sending[rounds] - sending[fewer])
            for fewer, steps in rising.items()
        ),
    )


def _fewer_rounds(recipe: Recipe, phase: RecipePhase, cluster: Cluster, rounds: int) -> Counter[int]:
    """While its batch rises: of how many rounds how many steps are, where these are fewer than `rounds`."""
    batches = step_batches(recipe, phase)
    if batches.rise is None:
        return Counter()
    share = recipe.microbatch_of(phase) * cluster.ranks * (1 if phase.batch.sequences else phase.length)
    found = Counter(-(-batches.at(step) // share) for step in range(min(batches.rise.steps, phase.steps)))
    return Counter({fewer: steps for fewer, steps in found.items() if fewer < rounds})


def network_bytes(parameters: int, ranks: int, recipe: Recipe, rounds: int) -> float:
    """What each rank sends in a step, in rings.

    Gradients travel in `reduce_dtype`: reduced to all once a step at stages 0 and 1, and after each microbatch at
    stage 2; to their owners at stage 3. Then updated weights are gathered in the working precision, at stage 3 before
    each forward and backward pass, of which a contrastive step has one more. Muon's matrices, which stage 3 cuts,
    travel to the rank that orthogonalises them and back, in bfloat16; stages 1 and 2 cut few, which are left out.
    """
    share = parameters * (ranks - 1) / ranks
    weights = share * (2 if recipe.precision == "bf16" else 4)
    gradients = share * (2 if recipe.precision == "bf16" and recipe.reduce_dtype == "bf16" else 4)
    match recipe.zero:
        case 0:
            return 2 * gradients
        case 1:
            return 2 * gradients + weights
        case 2:
            return 2 * rounds * gradients + weights
        case _:
            passes = 2 if recipe.objective.contrastive is None else 3
            matrices = sum(prod(shape) for shape in momentum_matrices(recipe)) / ranks * (ranks - 1) / ranks
            return rounds * (gradients + passes * weights) + 2 * 2 * matrices
