"""Small networks of every kind for a few steps: under a real DeepSpeed engine on ranks, and by a plain loop in one
process. For `run_ranks`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from step_batch import in_random_order, make_batch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.initialise import initialise
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.objectives.modules.losses import CoupledObjective, LossSums, ObjectiveModule
from encoder_core.objectives.modules.teacher import FrozenNetworks, frozen_weights
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.settings import Precision
from encoder_core.train.state import TrainState
from encoder_core.train.step import Microbatch, RankBatch, accumulate_gradients, seed_draws
from encoder_core.train.weight_check import CorruptReplica, ensure_same_weights
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import KINDS
from tests.support.models.small_networks import NETWORKS, build, first_pass, with_forms
from tests.support.ranks.fragments import Whole, gathered
from tests.support.ranks.small_training import small_engine

MICROBATCHES, SEED, RATE, CLIP = 3, 5, 1e-3, 0.5  # of two ranks one idles in the last round
OPTIMIZER = AdamWConfig(lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, clip=CLIP)
BY_NAME = {network.name: network for network in NETWORKS}

Norms = list[tuple[float, ...]]
"""By step: the gradient norm of each update group."""


@dataclass(frozen=True)
class Trace:
    """What a run came to.

    Attributes:
        norms: gradient norms.
        state: everything that a checkpoint would hold.
        updates: number of applied updates by update group.
        teachers: weights of the teachers at the end.
        damage_found: whether the ranks noticed that one of them had another teacher.
    """

    norms: Norms
    state: Whole
    updates: dict[str, int]
    teachers: list[np.ndarray]
    damage_found: bool


@dataclass(frozen=True)
class Job:
    """A network, how it is trained, and for which steps. Stage 3 shards even the smallest parameter.

    Attributes:
        compiled: DeepSpeed takes layers for compiled ones, though all is computed in Python.
        start: what the steps begin with; None: fresh weights.
        poisoned: update group whose gradients are NaN.
    """

    network: str
    stage: Stage
    precision: Precision = "fp32"
    steps: range = range(4)
    compiled: bool = False
    start: Trace | None = None
    poisoned: str | None = None


def fresh(name: str) -> ObjectiveModule:
    module = build(BY_NAME[name])
    torch.manual_seed(3)
    initialise(module, 0.1)
    for network in teachers_of(module):
        initialise(network, 0.3)
    return module


def teachers_of(module: nn.Module) -> list[nn.Module]:
    held = (part for part in module.modules() if isinstance(part, FrozenNetworks))
    return [network for part in held for network in part.networks]


def batches(name: str, step: int) -> list[Batch]:
    """The microbatches of a step, the same at every call."""
    return [_batch(name, 10 * step + i, 5 + i) for i in range(MICROBATCHES)]


def _batch(name: str, seed: int, shortest: int) -> Batch:
    torch.manual_seed(seed)
    network = BY_NAME[name]
    if network.objective.plm is not None:
        return in_random_order(make_batch([24] * 3, 500))
    batch = with_forms(network, make_batch([9, 24, shortest], 500))
    return replace(batch, languages=batch.segments) if hasattr(network.model, "languages") else batch


def _counts(module: ObjectiveModule, everything: list[Batch]) -> dict[str, float]:
    counts = [module.target_counts(batch) for batch in everything]
    return {name: float(sum(its[name] for its in counts)) for name in counts[0]}


def train(rank: int, world: int, jobs: list[Job]) -> list[Trace]:
    """One after the other."""
    control = RankGroup.join()
    return [_train(control, job) for job in jobs]


def train_twice(rank: int, world: int, jobs: list[Job]) -> list[tuple[Trace, Trace]]:
    """Each job at once, and with a restore into a new engine after half of its steps."""
    control, pairs = RankGroup.join(), []
    for job in jobs:
        middle = len(job.steps) // 2
        half = _train(control, replace(job, steps=job.steps[:middle]))
        pairs.append((_train(control, job), _train(control, replace(job, steps=job.steps[middle:], start=half))))
    return pairs


def train_poisoned(rank: int, world: int, jobs: list[Job]) -> list[tuple[Trace, dict[str, Trace]]]:
    """Of each job the first step, and after it, by update group, one in which the gradient of that group is NaN."""
    control, found = RankGroup.join(), []
    for job in jobs:
        before = _train(control, replace(job, steps=range(1)))
        after = {
            group: _train(control, replace(job, steps=range(1, 2), start=before, poisoned=group))
            for group in before.updates
        }
        found.append((before, after))
    return found


def _train(control: RankGroup, job: Job) -> Trace:
    module = fresh(job.network)
    if job.compiled:
        nothing = Pieces("eager")
        nothing.close()
        compile_layers(module, nothing)
    if job.poisoned is not None:
        module.register_forward_hook(_poison(job.poisoned))
    groups = parameter_groups(module, OPTIMIZER.weight_decay, update_groups=module.update_groups())
    engine = small_engine(module, AdamW(groups, OPTIMIZER), job.stage, job.precision, clip=CLIP)
    engine.set_training(True)
    state = TrainState()
    if job.start is not None:
        its, state = job.start.state, TrainState(updates=job.start.updates)
        engine.restore(KINDS, lambda name, kind, a, b: torch.from_numpy(its[name][kind][a:b]))
    norms = []
    for step in job.steps:
        state, found = _step(engine, control, state, batches(job.network, step), step)
        norms.append(found)
    ensure_same_weights(engine.replicated, control, state.step)
    weights = [weight for _, weight in frozen_weights(module)]
    teachers = [weight.float().numpy().copy() for weight in weights]
    damage = _finds_damage(engine, control, weights) if weights else False
    trace = Trace(norms, gathered(engine), dict(state.updates), teachers, damage)
    engine.close()
    return trace


def _poison(group: str) -> Callable[..., LossSums]:
    def hook(module: nn.Module, given: object, losses: LossSums) -> LossSums:
        detected = group == "discriminator"
        terms = tuple(
            replace(term, loss_sum=term.loss_sum * float("nan")) if detected == (term.name == "rtd") else term
            for term in losses.terms
        )
        return replace(losses, terms=terms)

    return hook


def _step(
    engine: Engine, control: RankGroup, state: TrainState, everything: list[Batch], step: int
) -> tuple[TrainState, tuple[float, ...]]:
    """As the loop does it."""
    assert isinstance(engine.objective, ObjectiveModule)
    mine = tuple(Microbatch(i, batch) for i, batch in enumerate(everything) if i % control.world == control.rank)
    counts, memories, updates = _counts(engine.objective, everything), dict[int, tuple[Tensor, ...]](), {}
    for group in engine.update_groups:
        accumulate_gradients(engine, RankBatch(step, mine, MICROBATCHES), counts, SEED, memories, group)
        updates[group] = engine.update(RATE, state.next_update_number(group), group)
    applied = {group: update.applied for group, update in updates.items()}
    return state.after_step(applied=applied, tokens=0), tuple(update.grad_norm for update in updates.values())


def _finds_damage(engine: Engine, control: RankGroup, weights: list[Tensor]) -> bool:
    """Whether the ranks notice that rank 0's copy of a teacher is another; alone there is nothing to compare."""
    if control.rank == 0:
        weights[5].view(-1)[0] += 1.0
    try:
        ensure_same_weights(engine.replicated, control, 1)
    except CorruptReplica as found:
        return found.tensor is not None and found.tensor.startswith("frozen.0.")
    return False


def alone(name: str, steps: int) -> tuple[Norms, dict[str, np.ndarray]]:
    """Norms, and weights after so many steps, in one process: neither engine nor our optimizer."""
    module = fresh(name)
    named, groups = dict(module.named_parameters()), module.update_groups()
    optimizers = {
        group: torch.optim.AdamW(_decayed(named, parameters), lr=RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
        for group, parameters in groups.items()
    }
    norms = []
    for step in range(steps):
        everything, memories, found = batches(name, step), dict[int, tuple[Tensor, ...]](), list[float]()
        counts = _counts(module, everything)
        for group, optimizer in optimizers.items():
            if isinstance(module, CoupledObjective):
                memories = dict(enumerate(first_pass(module, everything, partial(seed_draws, SEED, step))))
            module.zero_grad()
            for i, batch in enumerate(everything):
                seed_draws(SEED, step, i, group)
                losses: LossSums = module(batch, memories[i]) if i in memories else module(batch)
                if len(groups) > 1:
                    memories[i] = losses.memory
                shares = [term.weight * term.loss_sum / counts[term.name] for term in losses.terms]
                torch.stack(shares).sum().backward()
            found.append(float(nn.utils.clip_grad_norm_(list(groups[group]), CLIP)))
            optimizer.step()
        norms.append(tuple(found))
    return norms, {name: p.detach().numpy().ravel() for name, p in named.items()}


def _decayed(named: dict[str, nn.Parameter], parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """Neither norms nor biases decay."""
    own = {id(p) for p in parameters}
    plain = {name for name in named if name.endswith("bias") or "norm" in name}
    return [
        {
            "params": [p for name, p in named.items() if id(p) in own and (name in plain) == (not decay)],
            "weight_decay": decay,
        }
        for decay in (0.0, OPTIMIZER.weight_decay)
    ]
