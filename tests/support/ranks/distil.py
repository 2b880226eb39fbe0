"""Distillation: through the engine on real ranks, and as plain PyTorch networks side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.distil import CosineConfig, DistilConfig, HiddenConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.modules.teacher import build_teacher, frozen_weights, hold_teachers
from encoder_core.objectives.term import TermConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import Control
from encoder_core.train.step import Microbatch, RankBatch, accumulate
from encoder_core.train.weight_check import CorruptReplica, ensure_same
from tests.support.models.parity import make_batch, states_of
from tests.support.ranks.fragments import Whole, gathered
from tests.support.ranks.small_training import Setting, small_engine

MICROBATCHES, SEED, RATE, CLIP = 3, 5, 1e-3, 0.5
VOCAB, TEMPERATURE, MLM, DISTIL, COSINE = 60, 2.0, 2.0, 5.0, 1.0
SHAPE: dict[str, Any] = {"hidden": 16, "heads": 2, "feed_forward": 24, "max_length": 24, "vocab": VOCAB}
STUDENT = BertConfig(**SHAPE, layers=2, token_types=1, dropout=0.0, attention_dropout=0.0)
TEACHERS: tuple[ModelConfig, ...] = (  # with dropout, which a teacher never uses
    BertConfig(**SHAPE, layers=4, dropout=0.5, attention_dropout=0.5),
    RobertaConfig(**SHAPE, layers=3, dropout=0.5, attention_dropout=0.5),
)
OPTIMIZER = AdamWConfig(lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, clip=CLIP)
NARROW = BertConfig(**SHAPE | {"hidden": 8}, layers=2, token_types=1, dropout=0.0, attention_dropout=0.0)
LEARNT, HIDDEN = (0, 1, 4), 3.0  # states of the first teacher, for the narrow student's embeddings and layers


@dataclass(frozen=True)
class Case:
    """A student, how many of the teachers it has, and its terms beside mlm and distil."""

    student: ModelConfig
    teachers: int
    further: Mapping[str, TermConfig]

    @property
    def terms(self) -> dict[str, TermConfig]:
        sources = tuple(TeacherSource(uri="somewhere", model=model) for model in TEACHERS[: self.teachers])
        distil = DistilConfig(weight=DISTIL, temperature=TEMPERATURE, teachers=sources)
        return {"mlm": MlmConfig(weight=MLM), "distil": distil, **self.further}


CASES = {
    "distilbert": Case(STUDENT, 2, {"cosine": CosineConfig(weight=COSINE)}),
    "tinybert": Case(NARROW, 1, {"hidden": HiddenConfig(weight=HIDDEN, layers=LEARNT, projection=16)}),
}


@dataclass(frozen=True)
class Trace:
    """What a run came to: norms, the trained state, what checkpoints would name, and the teachers' bits at the end."""

    norms: list[float]
    state: Whole
    teachers: list[np.ndarray]
    damage_found: bool


def teacher_network(number: int) -> MultitaskModel:
    torch.manual_seed(30 + number)
    made = masked_language_model(TEACHERS[number])
    initialise(made, std=0.3)
    return made


def joint(case: Case) -> ObjectiveModule:
    """The module that the engine wraps, with its teachers."""
    torch.manual_seed(3)
    model = compose(case.student, case.terms)
    initialise(model, std=0.1)
    networks = [teacher_network(number) for number in range(case.teachers)]
    weights = [{name: p.detach() for name, p in made.named_parameters()} for made in networks]
    hold_teachers(model, [build_teacher(*known) for known in zip(TEACHERS, weights, strict=False)])
    return model


def batches(step: int) -> list[Batch]:
    return [
        make_batch([9, 24, 5 + i], VOCAB, segments=False, seed=10 * step + i) for i in range(MICROBATCHES)
    ]


def train(rank: int, world: int, case: str, settings: list[Setting], steps: int) -> list[Trace]:
    """From the start, under each setting."""
    return [_train(CASES[case], setting, steps) for setting in settings]


def _train(case: Case, setting: Setting, steps: int) -> Trace:
    control, model = Control.join(), joint(case)
    optimizer = AdamW(parameter_groups(model, OPTIMIZER.weight_decay), OPTIMIZER)
    engine = small_engine(model, optimizer, setting.stage, setting.precision, clip=CLIP)
    norms = []
    for step in range(steps):
        everything = batches(step)
        mine = tuple(
            Microbatch(i, batch) for i, batch in enumerate(everything) if i % control.world == control.rank
        )
        accumulate(engine, RankBatch(step, mine, MICROBATCHES), _counts(everything), SEED, {})
        norms.append(engine.update(RATE, step + 1).grad_norm)
    ensure_same(engine.replicated, control, steps)
    weights = [weight for _, weight in frozen_weights(model)]
    teachers = [weight.float().numpy().copy() for weight in weights]
    return Trace(norms, gathered(engine), teachers, _finds_damage(engine, control, weights))


def _finds_damage(engine: Engine, control: Control, weights: list[Tensor]) -> bool:
    """Whether the ranks notice that rank 0's copy of a teacher is another; alone there is nothing to compare."""
    if control.rank == 0:
        weights[5].view(-1)[0] += 1.0
    try:
        ensure_same(engine.replicated, control, 1)
    except CorruptReplica as found:
        return found.tensor is not None and found.tensor.startswith("frozen.0.")
    return False


def _counts(everything: list[Batch]) -> dict[str, float]:
    tokens = float(sum(batch.tokens.numel() for batch in everything))
    targets = float(sum(batch.target_ids.numel() for batch in everything))
    return {"mlm": targets, "distil": tokens, "cosine": tokens, "hidden": tokens}


# The reference: no engine, no terms, all logits at once. Networks side by side, and the formulas.


def reference(case: Case, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Norms, and the student's weights after so many steps."""
    student, own = masked_language_model(case.student), dict(joint(case).named_parameters())
    if "hidden" in case.further:
        student.hidden_projection = nn.Linear(8, 16)
    with torch.no_grad():
        for name, p in student.named_parameters():
            p.copy_(own[name])
    teachers = [teacher_network(number).eval() for number in range(case.teachers)]
    named = dict(student.named_parameters())
    optimizer = torch.optim.AdamW(_groups(named), lr=RATE, betas=(0.9, 0.999), eps=1e-6)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        everything = batches(step)
        losses = torch.stack([torch.stack(term_sums(student, teachers, batch)) for batch in everything]).sum(
            0
        )
        mlm, kl, states = losses
        counts, weight = _counts(everything), HIDDEN if "hidden" in case.further else COSINE
        loss = MLM * mlm / counts["mlm"] + (DISTIL * kl + weight * states) / counts["distil"]
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(student.parameters(), CLIP)))
        optimizer.step()
    return norms, {name: p.detach().numpy().ravel() for name, p in named.items()}


def term_sums(
    student: MultitaskModel, teachers: list[MultitaskModel], batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the masked tokens' cross-entropy, of T^2 KL, and of 1 - cos or of the layers' squared differences."""
    states = student.encoder(batch)
    logits = student.head.logits(states)
    mlm = F.cross_entropy(logits[batch.target_positions], batch.target_ids, reduction="sum")
    with torch.no_grad():
        theirs = [teacher.encoder(batch) for teacher in teachers]
        said = [teacher.head.logits(h) for teacher, h in zip(teachers, theirs, strict=True)]
        p = torch.stack([(logits / TEMPERATURE).softmax(-1) for logits in said]).mean(0)
    kl = TEMPERATURE**2 * (p * (p.log() - (logits / TEMPERATURE).log_softmax(-1))).sum()
    projection = getattr(student, "hidden_projection", None)
    if projection is not None:
        own, its = (states_of(model.encoder, batch) for model in (student, teachers[0]))
        pairs = zip(
            (projection(h) for h in own),
            (its[number].detach() for number in LEARNT),
            strict=True,
        )
        return mlm, kl, sum((((a - b) ** 2).mean(-1).sum() for a, b in pairs), start=torch.zeros(()))
    cosine = torch.stack([(1 - F.cosine_similarity(states, h, dim=-1)).sum() for h in theirs]).mean()
    return mlm, kl, cosine


def _groups(named: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    plain = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
    decayed = [p for name, p in named.items() if not (name.endswith("bias") or "norm" in name)]
    return [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.01}]
