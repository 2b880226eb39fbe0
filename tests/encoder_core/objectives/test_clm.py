"""Next-token prediction as the trainer sees it: the literal formula, and beside masked tokens in turn."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import Batch, idle_batch
from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import NspConfig
from encoder_core.objectives.term import TermConfig
from encoder_core.train.metrics import figures_from_sums, sum_losses
from encoder_core.train.step import Microbatch
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, families, trained_by

MODELS = families() | {
    "relative_keys": BertConfig(**SIZE, position="relative_key"),
    "deberta": DebertaConfig(**SIZE, mask_decoder="plain"),
}
BOTH: tuple[TermConfig, ...] = (MlmConfig(), ClmConfig())


def causal_rows(lengths: list[int]) -> Batch:
    """Every token of a row but its first is a target, as it stands in the input."""
    batch = make_batch(lengths, 50)
    at_M = torch.arange(len(batch.tokens))[batch.positions > 0]
    return replace(batch, causal=True, target_positions=at_M, target_ids=batch.tokens[at_M])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sums_are_the_literal_formula(model: ModelConfig) -> None:
    """Row by row, each prefix by itself without any mask: what a token is predicted from is what stands before it."""
    network, batch = trained_by(model, ClmConfig()), causal_rows([7, 12])
    with torch.no_grad():
        outcome = network(batch)
        expected, correct = torch.zeros((), dtype=torch.float64), 0
        for start, stop in ((0, 7), (7, 19)):
            for place in range(start + 1, stop):
                log_p = _after(network, batch.tokens[start:place])
                expected -= log_p[batch.tokens[place]]
                correct += int(log_p.argmax() == batch.tokens[place])
    assert [term.name for term in outcome.terms] == ["clm"]
    torch.testing.assert_close(outcome.terms[0].loss_sum, expected, rtol=1e-10, atol=1e-10)
    assert outcome.terms[0].targets == 17
    assert outcome.metrics["clm_correct"] == correct


def _after(network: MultitaskModel, prefix: Tensor) -> Tensor:
    """Log-probabilities of the token after `prefix`, a row by itself of which the last layer's last state is read."""
    count = len(prefix)
    none = torch.zeros(0, dtype=torch.int64)
    row = Batch(
        prefix,
        torch.tensor([0, count], dtype=torch.int32),
        count,
        torch.arange(count),
        none,
        none,
        causal=True,
    )
    last = network.states(row).all_states[-1:]
    return F.log_softmax(network.head.logits(last), -1)[0]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_beside_masked_tokens_each_has_targets_on_its_own_rows(model: ModelConfig) -> None:
    """One network with one head: the sums of either objective alone, and every parameter takes part in each."""
    both = trained_by(model, *BOTH)
    masked, causal = make_batch([5, 24, 9], 50), causal_rows([5, 24, 9])
    for name, alone, batch in (("mlm", MlmConfig(), masked), ("clm", ClmConfig(), causal)):
        single = trained_by(model, alone)
        single.load_state_dict(both.state_dict())
        expected, outcome = single(batch).terms[0], both(batch)
        found = {term.name: term for term in outcome.terms}
        assert both.target_counts(batch) == {"mlm": 0, "clm": 0} | {name: expected.targets}
        torch.testing.assert_close(found[name].loss_sum, expected.loss_sum, rtol=1e-12, atol=1e-12)
        other = found["clm" if name == "mlm" else "mlm"]
        assert (other.targets, other.loss_sum.item()) == (0, 0.0)
        both.zero_grad()
        torch.stack([term.loss_sum for term in outcome.terms]).sum().backward()
        assert all(parameter.grad is not None for parameter in both.parameters())
    assert len(dict(both.named_parameters())) == len(dict(trained_by(model, MlmConfig()).named_parameters()))


@pytest.mark.parametrize("terms", [BOTH, BOTH[1:]], ids=["both", "alone"])
def test_an_idle_batch_reaches_every_parameter(terms: Sequence[TermConfig]) -> None:
    network = trained_by(MODELS["bert"], *terms)
    outcome = network(idle_batch(torch.device("cpu")))
    torch.stack([term.loss_sum for term in outcome.terms]).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())


def test_rows_that_show_what_is_predicted_are_refused() -> None:
    network = trained_by(MODELS["bert"], ClmConfig())
    with pytest.raises(ModelError):
        network.target_counts(make_batch([5], 50))


def test_a_step_has_the_figures_of_what_it_trains() -> None:
    network = trained_by(MODELS["bert"], *BOTH)
    for batch, name in ((make_batch([5, 9], 50), "mlm"), (causal_rows([5, 9]), "clm")):
        figures = figures_from_sums(sum_losses(network, network, [Microbatch(0, batch)], 0))
        assert set(figures) == {"loss", f"{name}_loss", f"{name}_accuracy"}
        assert figures["loss"] == figures[f"{name}_loss"] > 0


REFUSED: dict[str, tuple[ModelConfig, tuple[TermConfig, ...]]] = {
    "two streams": (XlnetConfig(**SIZE), (ClmConfig(),)),
    "mask decoder": (DebertaConfig(**SIZE), BOTH),
    "convolution": (DebertaV2Config(**SIZE, mask_decoder="plain", convolution=3), (ClmConfig(),)),
    "next sentences": (MODELS["bert"], (*BOTH, NspConfig())),
    "two networks": (RobertaConfig(**SIZE), (*BOTH, ReplacedTokenConfig())),
}


@pytest.mark.parametrize(("model", "terms"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_causal_is_refused(model: ModelConfig, terms: tuple[TermConfig, ...]) -> None:
    with pytest.raises(ModelError):
        compose(model, {term.name: term for term in terms})
