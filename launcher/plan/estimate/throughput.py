"""How long a step takes: its FLOPs divided by the assumed speed of the GPUs, plus the time of the network and, with
Muon, of orthogonalisation."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from encoder_core.optim.muon import flops as orthogonalisation_flops
from launcher.runtime.capacity.devices import LINK_SHARE, AssumedUtilisation, Cluster
from launcher.runtime.capacity.workload import MicrobatchShape, microbatch_cost, microbatch_shape, model_cost
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import momentum_matrix_shapes
from launcher.runtime.recipe.timeline import batch_schedule


@dataclass(frozen=True)
class PhaseTime:
    """The time that one phase of a recipe takes on a cluster. Every row is assumed to be full.

    Attributes:
        steps: number of steps of the phase.
        rows: number of rows in a step; each text of a contrastive example is one row.
        length: number of tokens in a row.
        shape: shape of one microbatch.
        microbatches: number of microbatches in a step, over all ranks.
        rounds: number of microbatches in a step on the busiest rank.
        forward, model: FLOPs of one microbatch's forward pass, and of its forward and backward pass.
        executed: FLOPs that one microbatch runs, including what is computed twice.
        utilisation: share of the peak, assumed or measured.
        orthogonalising: FLOPs in bfloat16 that one rank spends on Muon's orthogonalisation in a step.
        compute: seconds of a step for forward and backward passes.
        optimizer: seconds of a step for orthogonalisation.
        network: seconds of a step for communication.
        spared: seconds that the smaller batches of a batch-size warm-up save in the whole phase.
    """

    steps: int
    rows: int
    length: int
    shape: MicrobatchShape
    microbatches: int
    rounds: int
    forward: int
    model: int
    executed: int
    utilisation: AssumedUtilisation
    orthogonalising: float
    compute: float
    optimizer: float
    network: float
    spared: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step. Communication is assumed not to overlap with computation."""
        return self.compute + self.optimizer + self.network

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.length / self.step_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole phase without failures."""
        return self.steps * self.step_seconds - self.spared


def estimate_phase_time(
    recipe: Recipe,
    phase: RecipePhase,
    cluster: Cluster,
    parameter_count: int,
    utilisation: AssumedUtilisation,
) -> PhaseTime:
    """Return the time of `phase` on `cluster`. `parameter_count` is the number of parameters of all networks."""
    rows, shape = phase.rows_per_step, microbatch_shape(recipe, phase)
    flops = model_cost(recipe, shape)
    microbatches = -(-rows // recipe.microbatch_rows(phase))
    rounds = -(-microbatches // cluster.ranks)
    executed = microbatch_cost(recipe, shape)
    done = executed.model + executed.first_pass  # `executed.model` includes recomputed layers
    rising = _warmup_rounds(recipe, phase, cluster, rounds)
    peak = cluster.gpu.peak if recipe.precision == "bf16" else cluster.gpu.peak_fp32
    moved = {fewer: network_bytes(parameter_count, cluster.ranks, recipe, fewer) for fewer in {rounds, *rising}}
    matrices = sum(orthogonalisation_flops(shape) for shape in momentum_matrix_shapes(recipe))
    orthogonalising = matrices / (cluster.ranks if recipe.zero else 1)  # at ZeRO stage 0 every rank orthogonalises all
    compute = rounds * done / (peak * utilisation.share)
    sending = {fewer: sent / (LINK_SHARE * cluster.slowest_link_rate) for fewer, sent in moved.items()}
    return PhaseTime(
        steps=phase.steps,
        rows=rows * recipe.input.texts_per_row,
        length=phase.length,
        shape=shape,
        microbatches=microbatches,
        rounds=rounds,
        forward=flops.forward,
        model=flops.model,
        executed=done,
        utilisation=utilisation,
        orthogonalising=orthogonalising,
        compute=compute,
        optimizer=orthogonalising / (cluster.gpu.peak * utilisation.share),
        network=sending[rounds],
        spared=sum(
            steps * (compute * (1 - fewer / rounds) + sending[rounds] - sending[fewer])
            for fewer, steps in rising.items()
        ),
    )


def _warmup_rounds(recipe: Recipe, phase: RecipePhase, cluster: Cluster, rounds: int) -> Counter[int]:
    """Count the steps of a batch-size warm-up by their number of rounds, without steps of `rounds` rounds or more."""
    batches = batch_schedule(recipe, phase)
    if batches.rise is None:
        return Counter()
    share = recipe.microbatch_rows(phase) * cluster.ranks * (1 if phase.batch.sequences else phase.length)
    found = Counter(-(-batches.batch_at_step(step) // share) for step in range(min(batches.rise.steps, phase.steps)))
    return Counter({fewer: steps for fewer, steps in found.items() if fewer < rounds})


def network_bytes(parameter_count: int, ranks: int, recipe: Recipe, microbatches_per_step: int) -> float:
    """Return the bytes that each rank sends in a step of `microbatches_per_step` microbatches, with ring collectives.

    Gradients travel in `reduce_dtype`. Stages 0 and 1 reduce them to all ranks once a step, stage 2 after each
    microbatch; stage 3 reduces them to their owners after each microbatch. Updated weights are then gathered in the
    working precision: once a step at stages 1 and 2, at stage 3 before each forward and backward pass. A contrastive
    step has one forward pass more. Stage 3 shards Muon's matrices: they travel in bfloat16 to the rank that
    orthogonalises them, and back. Stages 1 and 2 shard few matrices, which are not counted.
    """
    share = parameter_count * (ranks - 1) / ranks
    weights = share * (2 if recipe.precision == "bf16" else 4)
    gradients = share * (2 if recipe.precision == "bf16" and recipe.reduce_dtype == "bf16" else 4)
    match recipe.zero:
        case 0:
            return 2 * gradients
        case 1:
            return 2 * gradients + weights
        case 2:
            return 2 * microbatches_per_step * gradients + weights
        case _:
            passes = 2 if recipe.objective.contrastive is None else 3
            matrices = sum(prod(shape) for shape in momentum_matrix_shapes(recipe)) / ranks * (ranks - 1) / ranks
            return microbatches_per_step * (gradients + passes * weights) + 2 * 2 * matrices
