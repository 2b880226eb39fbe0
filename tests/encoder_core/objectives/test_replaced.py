"""ELECTRA's co-training against two plain networks, and the properties of its corruption."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.electra import ElectraConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.detection import (
    Discriminator,
    Part,
    ReplacedTokenDetection,
    discriminator_model,
    replace_targets,
    shared_parameter_name,
)
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.random_draws import draw_key, uniforms
from tests.support.models.parity import make_batch, random_weights

CONFIG = ElectraConfig(
    layers=2, hidden=32, heads=4, feed_forward=64, embedding=8, generator_divisor=2, max_length=40, vocab=60
)
WEIGHT = 50.0


def joint() -> ReplacedTokenDetection:
    model = ReplacedTokenConfig(weight=WEIGHT).build(CONFIG)
    torch.manual_seed(0)
    initialise(model)
    return model.double()


def test_the_networks_share_exactly_their_embeddings() -> None:
    model = joint()
    generator, discriminator = model.generator, model.discriminator
    assert generator.encoder.embeddings is discriminator.encoder.embeddings
    assert generator.head.decoder.weight is generator.encoder.embeddings.word.weight
    shared = {*map(id, generator.parameters())} & {*map(id, discriminator.parameters())}
    assert shared == {*map(id, generator.encoder.embeddings.parameters())}
    assert generator.get_parameter("encoder.projection.weight").shape == (16, 8)
    assert discriminator.get_parameter("encoder.projection.weight").shape == (32, 8)


def test_stored_names_are_those_of_the_module() -> None:
    model = joint()
    names = {name for name, _ in model.named_parameters()}
    parts: dict[Part, torch.nn.Module] = {"generator": model.generator, "discriminator": model.discriminator}
    found = {
        shared_parameter_name(part, name) for part, module in parts.items() for name, _ in module.named_parameters()
    }
    assert found == names


def test_corruption_draws_at_targets_only_and_labels_what_differs() -> None:
    batch = make_batch([20, 30], 60)
    drawn = batch.target_ids.clone()
    drawn[::2] = (drawn[::2] + 1) % 60
    corrupted, replaced = replace_targets(batch, drawn)
    elsewhere = torch.ones_like(replaced)
    elsewhere[batch.target_positions] = False
    assert torch.equal(corrupted.tokens[elsewhere], batch.tokens[elsewhere])
    assert not replaced[elsewhere].any()
    assert torch.equal(corrupted.tokens[batch.target_positions], drawn)
    assert torch.equal(replaced[batch.target_positions], drawn != batch.target_ids)


def plain_step(generator: MultitaskModel, discriminator: Discriminator, batch: Batch, seed: int) -> Tensor:
    """The loss of the paper, written out: two networks, the drawn tokens between them."""
    torch.manual_seed(seed)
    logits = generator.logits(batch)
    mlm = F.cross_entropy(logits, batch.target_ids)
    with torch.no_grad():
        cumulated = logits.softmax(-1).cumsum(-1)  # the vocabulary is one group, so the second draw decides
        draws = uniforms(batch.random_keys[batch.target_positions], draw_key(), 2)[:, 1:] * cumulated[:, -1:]
        sampled = (cumulated <= draws).sum(-1)
    tokens = batch.tokens.clone()
    tokens[batch.target_positions] = sampled
    original = batch.tokens.clone()
    original[batch.target_positions] = batch.target_ids
    scores = discriminator.logits(replace(batch, tokens=tokens))
    rtd = F.binary_cross_entropy_with_logits(scores, (tokens != original).double())
    return mlm + WEIGHT * rtd


@pytest.mark.long
def test_ten_steps_equal_two_plain_networks_with_one_optimizer() -> None:
    ours = joint().eval()
    generator = masked_language_model(CONFIG.generator).double().eval()
    discriminator = discriminator_model(CONFIG).double().eval()
    discriminator.encoder.embeddings = generator.encoder.embeddings
    own = dict(ours.named_parameters())
    parts: dict[Part, torch.nn.Module] = {"generator": generator, "discriminator": discriminator}
    with torch.no_grad():
        for part, module in parts.items():
            for name, parameter in module.named_parameters():
                parameter.copy_(own[shared_parameter_name(part, name)])
    plain = {*generator.parameters(), *discriminator.parameters()}
    ours_optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.AdamW(plain, lr=1e-3)
    for step in range(10):
        batch = make_batch([20, 30], 60, seed=step)
        torch.manual_seed(step)
        terms = ours(batch).terms
        loss = sum(term.weight * term.loss_sum / term.targets for term in terms)
        expected = plain_step(generator, discriminator, batch, step)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for optimizer, value in ((ours_optimizer, loss), (plain_optimizer, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(own[shared_parameter_name(part, name)], parameter, rtol=1e-7, atol=1e-9)


def test_no_gradient_reaches_the_generator_through_its_choice() -> None:
    model = joint().eval()
    batch = make_batch([20], 60)
    model(batch).terms[1].loss_sum.backward()
    for name, parameter in model.named_parameters():
        from_discriminator = name.startswith(("discriminator.", "generator.encoder.embeddings."))
        assert from_discriminator == (parameter.grad is not None and bool(parameter.grad.any())), name


def test_every_token_is_detected_and_replaced_ones_are_counted() -> None:
    model = random_weights(joint()).eval()
    batch = make_batch([20, 30], 60)
    outcome = model(batch)
    targets = batch.target_ids.numel()
    assert {term.name: (term.targets, term.weight) for term in outcome.terms} == {
        "mlm": (targets, 1.0),
        "rtd": (50, WEIGHT),
    }
    assert model.target_counts(batch) == {"mlm": targets, "rtd": 50}
    metrics = {name: int(value) for name, value in outcome.metrics.items()}
    assert 0 < metrics["rtd_replaced"] <= targets
    assert metrics["rtd_found"] <= min(metrics["rtd_flagged"], metrics["rtd_replaced"])
