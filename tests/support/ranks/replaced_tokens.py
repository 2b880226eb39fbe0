"""ELECTRA and DeBERTa v3: through the engine on real ranks, and as two plain PyTorch networks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from encoder_core.batch import Batch
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.detection import (
    Discriminator,
    ReplacedTokenDetection,
    discriminator_model,
    stored_name,
)
from encoder_core.objectives.modules.losses import LossSums
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.random_draws import draw_key, uniforms
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import Control
from encoder_core.train.settings import Precision
from encoder_core.train.state import TrainState
from encoder_core.train.step import Microbatch, RankBatch, accumulate, seed_draws
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import KINDS
from tests.support.models.parity import make_batch
from tests.support.ranks.fragments import Whole, gathered
from tests.support.ranks.small_training import small_engine

MICROBATCHES, SEED, RATE, CLIP = 3, 5, 1e-3, 0.5
VOCAB = 60  # fewer than one group of the sampler, whose second uniform number then decides
SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "feed_forward": 24,
    "max_length": 24,
    "vocab": VOCAB,
}
EXACT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
ELECTRA = ElectraConfig(**SHAPE, **EXACT, embedding=8, generator_divisor=2)
DEBERTA = DebertaV2Config(**SHAPE, **EXACT, buckets=8)
WEIGHT = 50.0
OPTIMIZER = AdamWConfig(lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, clip=CLIP)

Norms = list[tuple[float, ...]]
"""By step: the gradient norm of each turn."""


@dataclass(frozen=True)
class Setting:
    """One way to run, and for how long. Stage 3 shards even the smallest parameter."""

    family: str
    stage: Stage
    precision: Precision = "fp32"
    clip: float | None = CLIP
    steps: int = 1


@dataclass(frozen=True)
class Trace:
    """What a run came to: norms, the whole state, applied updates by turn, whether both networks have one embedding."""

    norms: Norms
    state: Whole
    updates: dict[str, int]
    shared: bool


def joint(family: str) -> ReplacedTokenDetection:
    torch.manual_seed(3)
    model: ReplacedTokenDetection
    if family == "electra":
        model = ReplacedTokenConfig(weight=WEIGHT).build(ELECTRA)
    else:
        sharing = ReplacedTokenConfig(weight=WEIGHT, embeddings="gradient_disentangled")
        model = sharing.build(DEBERTA)
    initialise(model, std=0.1)
    return model


def batches(step: int) -> list[Batch]:
    return [make_batch([9, 24, 5 + i], VOCAB, segments=True, seed=10 * step + i) for i in range(MICROBATCHES)]


def train(rank: int, world: int, settings: list[Setting]) -> list[Trace]:
    """From the start, under each setting."""
    return [_train(setting, range(setting.steps)) for setting in settings]


def train_twice(rank: int, world: int, settings: list[Setting]) -> list[tuple[Trace, Trace]]:
    """Under each setting four steps: at once, and with a save and a restore into a new engine after two."""
    pairs = []
    for setting in settings:
        half = _train(setting, range(2))
        pairs.append((_train(setting, range(4)), _train(setting, range(2, 4), half)))
    return pairs


def train_poisoned(rank: int, world: int, settings: list[Setting]) -> list[tuple[Trace, dict[str, Trace]]]:
    """Under each setting one step, and after it, by turn, one in which the gradient of that turn is NaN."""
    found = []
    for setting in settings:
        before = _train(setting, range(1))
        turns = ("generator", "discriminator")
        found.append((before, {turn: _train(setting, range(1, 2), before, turn) for turn in turns}))
    return found


class Poisonable(nn.Module):
    """Makes the gradient of one turn NaN."""

    def __init__(self, model: ReplacedTokenDetection, turn: str | None) -> None:
        super().__init__()
        self.model = model
        self.term = {"generator": "mlm", "discriminator": "rtd", None: None}[turn]

    def forward(self, batch: Batch, *memory: tuple[Tensor, ...]) -> LossSums:
        losses: LossSums = self.model(batch, *memory)
        terms = tuple(
            replace(term, loss_sum=term.loss_sum * float("nan")) if term.name == self.term else term
            for term in losses.terms
        )
        return replace(losses, terms=terms)


def _train(setting: Setting, steps: range, start: Trace | None = None, poisoned: str | None = None) -> Trace:
    control = Control.join()
    model = joint(setting.family)
    groups = parameter_groups(model, OPTIMIZER.weight_decay, update_groups=model.update_groups())
    engine = small_engine(
        Poisonable(model, poisoned),
        AdamW(groups, OPTIMIZER),
        setting.stage,
        setting.precision,
        clip=setting.clip,
    )
    state = TrainState()
    if start is not None:
        state = TrainState(updates=start.updates)
        engine.restore(KINDS, lambda name, kind, a, b: torch.from_numpy(start.state[name][kind][a:b]))
    norms = []
    for step in steps:
        state, found = _step(engine, control, state, step)
        norms.append(found)
    shared = model.generator.encoder.embeddings is model.discriminator.encoder.embeddings
    return Trace(norms, gathered(engine), dict(state.updates), shared)


def _step(
    engine: Engine, control: Control, state: TrainState, step: int
) -> tuple[TrainState, tuple[float, ...]]:
    """As the loop does it."""
    everything = batches(step)
    mine = tuple(
        Microbatch(i, batch) for i, batch in enumerate(everything) if i % control.world == control.rank
    )
    memories: dict[int, tuple[Tensor, ...]] = {}
    updates = {}
    for turn in engine.update_groups:
        accumulate(engine, RankBatch(step, mine, MICROBATCHES), _counts(everything), SEED, memories, turn)
        updates[turn] = engine.update(RATE, state.next_update(turn), turn)
    assert not memories
    applied = {turn: update.applied for turn, update in updates.items()}
    return state.after(applied=applied, tokens=0), tuple(update.grad_norm for update in updates.values())


def _counts(everything: list[Batch]) -> dict[str, float]:
    return {
        "mlm": float(sum(batch.target_ids.numel() for batch in everything)),
        "rtd": float(sum(batch.tokens.numel() for batch in everything)),
    }


# The reference: no engine, no shared modules, no memory. Two networks, and the formulas.


@dataclass(frozen=True)
class Plain:
    """Two separate networks and what joins them. `delta` is None where the embeddings are the generator's own."""

    generator: MultitaskModel
    discriminator: Discriminator
    delta: nn.Parameter | None

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the name that the joint module gives each parameter."""
        for name, p in self.generator.named_parameters():
            yield f"generator.{name}", p
        for name, p in self.discriminator.named_parameters():
            if self.delta is None:
                yield stored_name("discriminator", name), p
            else:
                yield f"discriminator.{name}", self.delta if name == WORDS else p


WORDS = "encoder.embeddings.word.weight"


def plain(family: str) -> Plain:
    """The joint module's initial weights in two networks of their own."""
    if family == "electra":
        generator, discriminator = masked_language_model(ELECTRA.generator), discriminator_model(ELECTRA)
        for table in ("word", "position", "token_type", "norm"):
            setattr(discriminator.encoder.embeddings, table, getattr(generator.encoder.embeddings, table))
        networks = Plain(generator, discriminator, None)
    else:
        generator, discriminator = masked_language_model(DEBERTA.generator), discriminator_model(DEBERTA)
        delta = nn.Parameter(torch.zeros(VOCAB, DEBERTA.hidden))
        networks = Plain(generator, discriminator, delta)
    own = dict(joint(family).named_parameters())
    with torch.no_grad():
        for name, p in networks.named():
            p.copy_(own[name])
    return networks


def reference(family: str, steps: int) -> tuple[Norms, dict[str, np.ndarray]]:
    """Norms, and weights after so many steps."""
    networks = plain(family)
    step = _one_update if family == "electra" else _two_updates
    optimizers = _optimizers(networks)
    norms = [step(networks, optimizers, batches(number), number) for number in range(steps)]
    return norms, {name: p.detach().numpy().ravel() for name, p in networks.named()}


def gradients(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the first step: of the generator's term alone, and of the discriminator's (weighted) alone."""
    found = []
    for number in range(2):
        networks = plain(family)
        sums = [term_sums(networks, batch, 0, i, family) for i, batch in enumerate(batches(0))]
        counts = _counts(batches(0))
        scale = (1 / counts["mlm"], WEIGHT / counts["rtd"])[number]
        (scale * sum((pair[number] for pair in sums), torch.zeros(()))).backward()
        found.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in networks.named()}
        )
    return found[0], found[1]


def _optimizers(networks: Plain) -> list[torch.optim.Optimizer]:
    """One for all parameters, or one for each network; LayerNorm and biases do not decay."""
    named = dict(networks.named())
    sides = (
        [named]
        if networks.delta is None
        else [
            {name: p for name, p in named.items() if name.startswith(part)}
            for part in ("generator", "discrim")
        ]
    )
    return [torch.optim.AdamW(_groups(side), lr=RATE, betas=(0.9, 0.999), eps=1e-6) for side in sides]


def _groups(named: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    plain = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
    decayed = [p for name, p in named.items() if not (name.endswith("bias") or "norm" in name)]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.01}]


def term_sums(networks: Plain, batch: Batch, step: int, index: int, family: str) -> tuple[Tensor, Tensor]:
    """Sums of MLM and of RTD on one microbatch."""
    mlm, drawn = _generate(networks, batch, step, index, "all" if family == "electra" else "generator")
    return mlm, _detect(networks, batch, drawn)


def _generate(networks: Plain, batch: Batch, step: int, index: int, turn: str) -> tuple[Tensor, Tensor]:
    logits = networks.generator.logits(batch)
    seed_draws(SEED, step, index, turn)
    draws = uniforms(batch.keys[batch.target_positions], draw_key(), 2)[:, 1:]
    cumulated = logits.detach().softmax(-1).cumsum(-1)
    drawn = (cumulated <= draws * cumulated[:, -1:]).sum(-1)
    return F.cross_entropy(logits, batch.target_ids, reduction="sum"), drawn


def _detect(networks: Plain, batch: Batch, drawn: Tensor) -> Tensor:
    tokens, original = batch.tokens.clone(), batch.tokens.clone()
    tokens[batch.target_positions] = drawn
    original[batch.target_positions] = batch.target_ids
    weights = {}
    if networks.delta is not None:
        base = dict(networks.generator.named_parameters())[WORDS]
        weights = {WORDS: base.detach() + networks.delta}
    # functional_call goes through forward, which here sums the loss itself: score first, then the formula
    scores = functional_call(
        _Scores(networks.discriminator),
        {f"of.{k}": v for k, v in weights.items()},
        (replace(batch, tokens=tokens),),
    )
    return F.binary_cross_entropy_with_logits(scores, (tokens != original).float(), reduction="sum")


class _Scores(nn.Module):
    def __init__(self, of: Discriminator) -> None:
        super().__init__()
        self.of = of

    def forward(self, batch: Batch) -> Tensor:
        scores: Tensor = self.of.logits(batch)
        return scores


def _one_update(
    networks: Plain, optimizers: list[torch.optim.Optimizer], everything: list[Batch], step: int
) -> tuple[float, ...]:
    """ELECTRA: the sum of both losses, one clip, one optimizer."""
    counts = _counts(everything)
    sums = [term_sums(networks, batch, step, i, "electra") for i, batch in enumerate(everything)]
    loss = sum(mlm for mlm, _ in sums) / counts["mlm"] + WEIGHT * sum(rtd for _, rtd in sums) / counts["rtd"]
    return (_update(optimizers[0], loss),)


def _two_updates(
    networks: Plain, optimizers: list[torch.optim.Optimizer], everything: list[Batch], step: int
) -> tuple[float, ...]:
    """DeBERTa v3: the generator's update, then the discriminator's on what that left of E_G."""
    counts = _counts(everything)
    made = [_generate(networks, batch, step, i, "generator") for i, batch in enumerate(everything)]
    first = _update(optimizers[0], sum(mlm for mlm, _ in made) / counts["mlm"])
    sums = [_detect(networks, batch, drawn) for batch, (_, drawn) in zip(everything, made, strict=True)]
    second = _update(optimizers[1], WEIGHT * sum(sums) / counts["rtd"])
    return first, second


def _update(optimizer: torch.optim.Optimizer, loss: Tensor | float) -> float:
    assert isinstance(loss, Tensor)
    optimizer.zero_grad()
    loss.backward()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(params, CLIP)
    optimizer.step()
    return float(norm)
