"""Rotary positions whose base changes."""

from typing import Any

import pytest
import torch

from encoder_core.families.catalogue import build_encoder
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


@pytest.mark.parametrize(
    "config", [ModernBertConfig(**SIZE, local_attention=8), EuroBertConfig(**SIZE, key_value_heads=1)]
)
def test_a_changed_base_makes_the_network_that_is_built_with_it(
    config: ModernBertConfig | EuroBertConfig,
) -> None:
    """Only layers that see the whole row change: ModernBERT's local ones keep their own."""
    torch.manual_seed(0)
    changed = build_encoder(config).eval()
    initialise(changed, 0.2)
    built = build_encoder(config.with_rope_base(100.0)).eval()
    built.load_state_dict(changed.state_dict())
    batch = make_batch([64, 30], 300)
    with torch.no_grad():
        before = changed(batch)
        set_rotary_base(changed, 100.0, local=False)
        after = changed(batch)
        assert torch.equal(after, built(batch))
    assert not torch.allclose(before, after, atol=1e-3)


def test_a_changed_local_base_changes_local_layers_alone() -> None:
    config = ModernBertConfig(**SIZE, local_attention=8)
    torch.manual_seed(0)
    changed = build_encoder(config).eval()
    initialise(changed, 0.2)
    built = build_encoder(config.model_copy(update={"local_rope_base": 100.0})).eval()
    built.load_state_dict(changed.state_dict())
    batch = make_batch([64, 30], 300)
    with torch.no_grad():
        before = changed(batch)
        set_rotary_base(changed, 100.0, local=True)
        assert torch.equal(changed(batch), built(batch))
        assert not torch.allclose(before, changed(batch), atol=1e-3)
