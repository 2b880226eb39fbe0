"""How long a step takes: FLOPs over what the GPUs are assumed to reach, and the network after it."""

from dataclasses import dataclass

from encoder_core.cost.flops import Count
from encoder_core.cost.products import Shape
from launcher.estimate.assumptions import LINK_SHARE, AssumedUtilisation
from launcher.estimate.cluster import Cluster
from launcher.estimate.workload import batch_rows, executed, microbatch_flops, microbatch_shape
from launcher.recipe.schema import Recipe, RecipePhase


@dataclass(frozen=True)
class PhaseTime:
    """One phase of a recipe on a cluster; rows taken as full.

    Attributes:
        steps, rows, length: of the phase; rows of one step, each text of an example counted as one.
        shape: one microbatch.
        microbatches: of one step; `rounds` of them on the rank that has most.
        flops: of one microbatch.
        utilisation: assumed or measured.
        compute, network: seconds of a step.
    """

    steps: int
    rows: int
    length: int
    shape: Shape
    microbatches: int
    rounds: int
    flops: Count
    utilisation: AssumedUtilisation
    compute: float
    network: float

    @property
    def step(self) -> float:
        """Seconds; nothing of the network is taken to be hidden behind the computation."""
        return self.compute + self.network

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.length / self.step

    @property
    def seconds(self) -> float:
        """Of the whole phase, undisturbed."""
        return self.steps * self.step


def phase_time(
    recipe: Recipe, phase: RecipePhase, cluster: Cluster, parameters: int, utilisation: AssumedUtilisation
) -> PhaseTime:
    """`parameters` of all networks."""
    rows, shape = batch_rows(phase), microbatch_shape(recipe, phase)
    flops = microbatch_flops(recipe, shape)
    microbatches = -(-rows // recipe.microbatch)
    rounds = -(-microbatches // cluster.ranks)
    done = executed(recipe, flops)
    peak = cluster.gpu.peak if recipe.precision == "bf16" else cluster.gpu.peak_fp32
    moved = network_bytes(parameters, cluster.ranks, recipe, rounds)
    return PhaseTime(
        phase.steps,
        rows * recipe.input.texts,
        phase.length,
        shape,
        microbatches,
        rounds,
        flops,
        utilisation,
        compute=rounds * done / (peak * utilisation.share) if utilisation.step is None else utilisation.step,
        network=moved / (LINK_SHARE * cluster.rate) if utilisation.step is None else 0.0,
    )


def network_bytes(parameters: int, ranks: int, recipe: Recipe, rounds: int) -> float:
    """What each rank sends in a step, in rings.

    Gradients travel in `reduce_dtype`: reduced to all once a step at stages 0 and 1, and after each microbatch at
    stage 2; to their owners at stage 3. Then updated weights are gathered in the working precision, at stage 3 before
    each forward and backward pass, of which a contrastive step has one more.
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
            return rounds * (gradients + passes * weights)
