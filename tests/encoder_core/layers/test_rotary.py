"""Rotary positions whose base changes."""

from typing import Any

import pytest
import torch

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.layers.attention import set_rotary_base
from encoder_core.layers.initialise import initialise
from tests.support.models.parity import make_batch

SIZE: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 2,
    "feed_forward": 48,
    "vocab": 300,
    "max_length": 64,
}


MODERN = ModernBertConfig(**SIZE, local_attention=8)
EURO = EuroBertConfig(**SIZE, key_value_heads=1)


@pytest.mark.parametrize(
    ("config", "other", "local"),
    [
        (MODERN, MODERN.with_rope_base(100.0), False),
        (EURO, EURO.with_rope_base(100.0), False),
        (MODERN, MODERN.model_copy(update={"local_rope_base": 100.0}), True),
    ],
)
def test_a_changed_base_makes_the_network_that_is_built_with_it(
    config: ModelConfig, other: ModelConfig, local: bool
) -> None:
    """Layers that see the whole row change, or local ones alone: each kind keeps its own base."""
    torch.manual_seed(0)
    changed = config.encoder().eval()
    initialise(changed, 0.2)
    built = other.encoder().eval()
    built.load_state_dict(changed.state_dict())
    batch = make_batch([64, 30], 300)
    with torch.no_grad():
        before = changed(batch)
        set_rotary_base(changed, 100.0, local=local)
        after = changed(batch)
        assert torch.equal(after, built(batch))
    assert not torch.allclose(before, after, atol=1e-3)
