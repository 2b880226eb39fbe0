"""DeBERTa v3's co-training: its two turns, its embeddings, its head. Steps on ranks: train/test_families.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.heads.classification import ReplacedTokenHead
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.detection import (
    GradientDisentangledDetection,
    discriminator_model,
    replace_targets,
)
from encoder_core.objectives.replaced import ReplacedTokenConfig
from tests.support.models.parity import make_batch, random_weights

SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "feed_forward": 48,
    "max_length": 40,
    "vocab": 60,
}
EXACT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
DEBERTA = DebertaV2Config(**SHAPE, **EXACT, buckets=8)
ELECTRA = ElectraConfig(**SHAPE, **EXACT, embedding=16, generator_divisor=2)
WORDS = "encoder.embeddings.word.weight"
OBJECTIVE = ReplacedTokenConfig(weight=10.0, embeddings="gradient_disentangled")


def built(config: ModelConfig = DEBERTA) -> GradientDisentangledDetection:
    torch.manual_seed(0)
    model = OBJECTIVE.build(config)
    assert isinstance(model, GradientDisentangledDetection)
    initialise(model)
    return model


def test_the_generator_is_as_wide_and_half_as_deep() -> None:
    assert DEBERTA.generator == DEBERTA.model_copy(update={"layers": 2})
    assert DEBERTA.model_copy(update={"generator_layers": 3}).generator.layers == 3
    assert DEBERTA.model_copy(update={"layers": 1}).generator.layers == 1


def test_differences_begin_at_zero() -> None:
    model = built()
    generator, discriminator = (dict(part.named_parameters()) for part in (model.generator, model.discriminator))
    assert not discriminator[WORDS].any()
    assert generator[WORDS].any()
    tokens = torch.arange(60)
    embedded = model.discriminator.encoder.embeddings.word(tokens)
    assert torch.equal(embedded, model.generator.encoder.embeddings.word(tokens))


@pytest.mark.parametrize("config", [DEBERTA, ELECTRA], ids=["deberta", "electra"])
def test_every_parameter_has_exactly_one_turn(config: ModelConfig) -> None:
    model = built(config)
    turns = model.update_groups()
    assert list(turns) == ["generator", "discriminator"]
    names = {id(p): name for name, p in model.named_parameters()}
    for turn, params in turns.items():
        assert all(names[id(p)].startswith(f"{turn}.") for p in params)
    placed = [id(p) for params in turns.values() for p in params]
    assert sorted(placed) == sorted(names)


@pytest.mark.parametrize("config", [DEBERTA, ELECTRA], ids=["deberta", "electra"])
def test_each_turn_teaches_its_own_network(config: ModelConfig) -> None:
    model = random_weights(built(config)).train()
    batch = make_batch([20, 30], 60, segments=True)
    first = model(batch)
    assert [(term.name, term.targets, term.weight) for term in first.terms] == [("mlm", batch.target_ids.numel(), 1.0)]
    second = model(batch, first.memory)
    assert [(term.name, term.targets, term.weight) for term in second.terms] == [("rtd", 50, 10.0)]
    assert not second.memory
    for turn, losses in (("generator", first), ("discriminator", second)):
        model.zero_grad()
        losses.terms[0].loss_sum.backward()
        for name, p in model.named_parameters():
            assert name.startswith(turn) == (p.grad is not None and bool(p.grad.any())), (turn, name)


def test_the_second_turn_judges_the_ids_that_the_first_drew() -> None:
    """Even though the generator has changed since. They are judged by a network whose words are E_G + E_delta."""
    model = random_weights(built()).train()
    batch = make_batch([20, 30], 60)
    memory = model(batch).memory
    random_weights(model.generator, seed=9)
    found = model(batch, memory)
    corrupted, replaced = replace_targets(batch, memory[0])
    plain = discriminator_model(DEBERTA).train()
    plain.load_state_dict(model.discriminator.state_dict(), strict=False)
    with torch.no_grad():  # E_G + E_delta
        plain.get_parameter(WORDS).add_(model.generator.get_parameter(WORDS))
    expected = F.binary_cross_entropy_with_logits(plain.logits(corrupted), replaced.float(), reduction="sum")
    torch.testing.assert_close(found.terms[0].loss_sum, expected)
    assert int(found.metrics["rtd_replaced"]) == int((memory[0] != batch.target_ids).sum())


def test_evaluation_takes_both_turns_in_one_call() -> None:
    model = random_weights(built())
    batch = make_batch([20, 30], 60)
    torch.manual_seed(4)
    turns = [model.train()(batch)]
    turns.append(model(batch, turns[0].memory))
    torch.manual_seed(4)
    both = model.eval()(batch)
    assert not both.memory
    for term, alone in zip(both.terms, (losses.terms[0] for losses in turns), strict=True):
        assert (term.name, term.targets) == (alone.name, alone.targets)
        torch.testing.assert_close(term.loss_sum, alone.loss_sum)
    assert both.metrics == turns[0].metrics | turns[1].metrics
    assert set(both.metrics) == {
        "mlm_correct",
        *(f"rtd_{n}" for n in ("correct", "replaced", "flagged", "found")),
    }


def test_the_head_joins_each_token_with_its_rows_first() -> None:
    head = random_weights(ReplacedTokenHead(8, activation="gelu", context_eps=1e-7)).double()
    hidden = torch.randn(5, 8, dtype=torch.float64)
    scores = head(hidden, torch.tensor([0, 0, 2, 2, 2]))
    for token, first in enumerate((0, 0, 2, 2, 2)):
        assert head.norm is not None
        joined = F.layer_norm(hidden[first] + hidden[token], (8,), head.norm.weight, head.norm.bias, 1e-7)
        inner = F.gelu(head.dense.weight @ joined + head.dense.bias)
        torch.testing.assert_close(scores[token], (head.score.weight @ inner + head.score.bias)[0])


def test_the_discriminator_tells_the_head_where_rows_begin() -> None:
    """Another row's tokens change nothing in this one."""
    model = random_weights(built()).double().eval()
    batch = make_batch([20, 30], 60)
    other = batch.tokens.clone()
    other[:20] = 7
    changed = replace(batch, tokens=other)
    before, after = (model.discriminator.logits(b) for b in (batch, changed))
    torch.testing.assert_close(before[20:], after[20:])
    assert not torch.allclose(before[:20], after[:20])


def test_shared_embeddings_are_possible_too() -> None:
    model = ReplacedTokenConfig().build(DEBERTA)
    assert model.generator.encoder.embeddings is model.discriminator.encoder.embeddings
    assert list(model.update_groups()) == ["all"]
