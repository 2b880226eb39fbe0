"""Masked diffusion against a plain statement of its loss, and apart as together."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from encoder_core.batch import Batch, idle_batch, select_rows
from encoder_core.errors import ModelError, TrainingError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.diffusion import DiffusionConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.train.metrics import figures_from_sums
from encoder_core.train.step import RunningSums
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, assert_reaches_every_parameter, trained_by

CONFIGS = (BertConfig(**SIZE), DebertaConfig(**SIZE), ModernBertConfig(**SIZE, local_attention=8))


def model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> MultitaskModel:
    return trained_by(config, DiffusionConfig()).to(dtype)


def batch_of(lengths: list[int], share: float = 0.5) -> Batch:
    batch = make_batch(lengths, 50, share=share)
    rates = torch.from_numpy(np.random.default_rng(3).uniform(0.01, 1, len(lengths)).astype(np.float32))
    return replace(batch, rates=rates, maskable=torch.tensor(lengths) - 2)


def stated(network: MultitaskModel, batch: Batch) -> float:
    """The loss, in fp64: of each row's hidden tokens -log p, over the row's rate; the mean over all tokens that could
    be hidden."""
    assert batch.rates is not None
    assert batch.maskable is not None
    logits = network.double().logits(batch).double()
    total, edges = 0.0, batch.cu_seqlens.tolist()
    for row, (first, last) in enumerate(pairwise(edges)):
        for number, place in enumerate(batch.target_positions.tolist()):
            if first <= place < last:
                scores = logits[number].tolist()
                peak = max(scores)
                log_sum = peak + math.log(math.fsum(math.exp(score - peak) for score in scores))
                total += (log_sum - scores[int(batch.target_ids[number])]) / float(batch.rates[row])
    return total / int(batch.maskable.sum())


def found(network: MultitaskModel, batch: Batch) -> dict[str, float]:
    sums = RunningSums()
    sums.add(network(batch))
    return figures_from_sums(sums.copy_to_host())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_loss_is_the_papers(config: ModelConfig, dtype: torch.dtype, tolerance: float) -> None:
    batch = batch_of([5, 30, 9, 3])
    figures = found(model(config, dtype), batch)
    expected = stated(model(config), batch)
    assert figures["diffusion_loss"] == pytest.approx(expected, rel=tolerance)
    assert figures["diffusion_bits"] == pytest.approx(expected / math.log(2), rel=tolerance)
    assert figures.keys() == {"loss", "diffusion_loss", "diffusion_bits", "diffusion_hidden_accuracy"}


def test_the_gradient_is_that_of_the_formula() -> None:
    batch = batch_of([5, 30, 9])
    network = model(CONFIGS[0])
    (term,) = network(batch).terms
    term.loss_sum.backward()
    ours = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad()
    losses = F.cross_entropy(network.logits(batch), batch.target_ids, reduction="none")
    assert batch.rates is not None
    row = torch.bucketize(batch.target_positions, batch.cu_seqlens.long(), right=True) - 1
    (losses / batch.rates.double()[row]).sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_rows_apart_sum_to_rows_together() -> None:
    network, together = model(CONFIGS[0]), batch_of([5, 24, 7, 12])
    apart = [network(select_rows(together, torch.tensor(rows))).terms[0] for rows in ([0, 2], [1, 3])]
    (whole,) = network(together).terms
    torch.testing.assert_close(sum(term.loss_sum for term in apart), whole.loss_sum)
    assert sum(term.targets for term in apart) == whole.targets == sum([5, 24, 7, 12]) - 8


def test_what_hides_nothing_and_an_idle_batch_reach_every_parameter() -> None:
    network = model(CONFIGS[0]).train()
    none = torch.zeros(0, dtype=torch.int64)
    bare = replace(batch_of([6]), target_positions=none, target_ids=none)
    for batch, targets in ((bare, 4), (idle_batch(torch.device("cpu")), 0)):
        (term,) = network(batch).terms
        assert (term.targets, term.loss_sum.item()) == (targets, 0)
        assert_reaches_every_parameter(network, batch)


def test_rows_without_rates_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"\brates?\b"):
        model(CONFIGS[0])(make_batch([5, 9], 50))


def test_it_stands_alone_and_not_on_xlnet() -> None:
    both = {"mlm": MlmConfig(), "diffusion": DiffusionConfig()}
    with pytest.raises(ModelError, match=r"\bdiffusion\b.*\bmlm\b"):
        compose(CONFIGS[0], both)
    with pytest.raises(ModelError, match=r"\bxlnet\b.*\bdiffusion\b"):
        compose(XlnetConfig(**SIZE), {"diffusion": DiffusionConfig()})
