"""Causal rows in whole networks: no token sees a later one, in any family whose layers allow it. Kernels by themselves:
test_attention.py."""

from dataclasses import replace

import pytest
import torch
from step_batch import make_batch

from encoder_core.errors import ModelError
from encoder_core.layers.initialise import initialise
from tests.support.models.small_networks import NETWORKS

NAMES = [
    "roberta",
    "bert with relative keys",
    "albert",
    "electra",
    "deberta without mask decoder",
    "modernbert",
    "eurobert",
    "xlm",
]
BY_NAME = {network.name: network.model for network in NETWORKS}


@pytest.mark.parametrize("name", NAMES)
def test_no_later_token_changes_an_earlier_state(name: str) -> None:
    """In a row and beside it: what is changed from some place on changes no state before it, and no other row."""
    config = BY_NAME[name]
    encoder = config.encoder()
    torch.manual_seed(1)
    initialise(encoder, 0.3, config.initializer)
    encoder = encoder.double().eval()
    batch = replace(make_batch([23, 40, 7], 500), causal=True)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        states = encoder(batch)
        for place in torch.randint(1, 40, (6,), generator=draws).tolist():
            tokens = batch.tokens.clone()
            tokens[23 + place : 63] = torch.randint(500, (40 - place,), generator=draws)
            changed = encoder(replace(batch, tokens=tokens))
            torch.testing.assert_close(changed[: 23 + place], states[: 23 + place], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(changed[63:], states[63:], rtol=1e-11, atol=1e-11)
            assert not torch.allclose(changed[62], states[62])
        assert not torch.allclose(encoder(replace(batch, causal=False)), states)


@pytest.mark.parametrize("name", ["deberta v2", "xlnet"])
def test_layers_that_look_ahead_refuse_causal_rows(name: str) -> None:
    encoder = BY_NAME[name].encoder()
    with pytest.raises(ModelError):
        encoder(replace(make_batch([9, 7], 500), causal=True))
