"""ALBERT, DeBERTa, ModernBERT, EuroBERT, XLM and XLNet for a few steps: under a real DeepSpeed engine, and in plain
PyTorch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import set_update
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import MASTER
from tests.support.models.parity import make_batch
from tests.support.ranks.fragments import Piece, pieces
from tests.support.ranks.small_training import small_engine

STEPS, RATE = 3, 1e-3
OPTIMIZER = AdamWConfig(lr=RATE, clip=None)
SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "feed_forward": 48,
    "max_length": 24,
    "vocab": 61,
}
EXACT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
FAMILIES = ("albert", "deberta", "deberta_v2", "modernbert", "eurobert", "xlm", "xlnet")


def model(family: str) -> nn.Module:
    torch.manual_seed(3)
    match family:
        case "albert":
            built: nn.Module = masked_language_model(AlbertConfig(**SHAPE, **EXACT, embedding=16))
        case "deberta":
            built = masked_language_model(DebertaConfig(**SHAPE, **EXACT))
        case "deberta_v2":
            built = masked_language_model(DebertaV2Config(**SHAPE, **EXACT, buckets=8, convolution=3))
        case "modernbert":
            built = masked_language_model(ModernBertConfig(**SHAPE, **EXACT, local_attention=8))
        case "eurobert":
            built = masked_language_model(EuroBertConfig(**SHAPE, **EXACT, key_value_heads=1))
        case "xlm":
            built = masked_language_model(
                XlmConfig(**SHAPE | {"feed_forward": 128}, **EXACT, languages=("en", "fr"))
            )
        case _:
            built = PlmConfig().build(XlnetConfig(**SHAPE, **EXACT, reuse=0, memory=0))
    initialise(built)
    return built


def batch(step: int, rank: int) -> Batch:
    """Rank 1 has no targets in the last step, as a rank without work has none."""
    made = make_batch([9, 24, 5], 61, segments=True, seed=10 * step + rank)
    order = torch.zeros_like(made.tokens)
    order[made.target_positions] = 1 + torch.arange(len(made.target_positions))
    made = replace(made, order=order, languages=made.segments)
    if rank == 1 and step == STEPS - 1:
        none = made.target_ids[:0]
        made = replace(made, target_positions=none, target_ids=none, order=torch.zeros_like(order))
    return made


def _targets(step: int) -> int:
    return sum(batch(step, rank).target_ids.numel() for rank in range(2))


def alone(family: str) -> dict[str, np.ndarray]:
    """Weights after all steps on both ranks' batches, in one process without DeepSpeed."""
    module = model(family)
    optimizer = AdamW(parameter_groups(module, OPTIMIZER.weight_decay), OPTIMIZER)
    for step in range(STEPS):
        module.zero_grad()
        for rank in range(2):
            (module(batch(step, rank)).terms[0].loss_sum / _targets(step)).backward()
        set_update(optimizer, lr=RATE, count=step + 1)
        optimizer.step()
    return {name: p.detach().numpy().ravel() for name, p in module.named_parameters()}


def sharded(rank: int, world: int, stage: Stage, compiled: bool) -> dict[str, list[Piece]]:
    """This rank's ranges of the same weights, trained under one ZeRO stage. `compiled`: DeepSpeed takes layers for
    compiled ones, though nothing was compiled before the first step, so that all is computed in Python."""
    return {family: _train(family, rank, stage, compiled) for family in FAMILIES}


def _train(family: str, rank: int, stage: Stage, compiled: bool) -> list[Piece]:
    module = model(family)
    if compiled:
        nothing = Pieces("eager")
        nothing.close()
        compile_layers(module, nothing)
    optimizer = AdamW(parameter_groups(module, OPTIMIZER.weight_decay), OPTIMIZER)
    engine = small_engine(module, optimizer, stage)
    engine.training(True)
    for step in range(STEPS):
        engine.backward(engine(batch(step, rank)).terms[0].loss_sum / _targets(step), last=True)
        assert engine.update(RATE, step + 1).applied
    return pieces(engine.fragments(), [MASTER])
