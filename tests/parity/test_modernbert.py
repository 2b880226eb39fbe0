"""ModernBERT's windows, and its rotary positions against transformers' to the bit. Its outputs: test_masked.py."""

import pytest
import torch
from transformers import ModernBertConfig as TheirConfig
from transformers.models.modernbert import modeling_modernbert

from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.layers.rows import Rows, rotate, rotation
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import make_batch, random_weights


def test_a_token_sees_its_window_and_no_further_row() -> None:
    """One local layer: what a change at one token moves is its row within the window."""
    shape = {"layers": 2, "hidden": 48, "heads": 4, "feed_forward": 80, "max_length": 600, "vocab": 101}
    config = ModernBertConfig.model_validate(shape | {"global_every": 9, "local_attention": 16})
    model = random_weights(masked_language_model(config)).double().eval()
    layer = model.encoder.layers[1]
    batch = make_batch([30, 200, 11], config.vocabulary_size)
    rows = Rows.from_batch(batch)
    states = torch.randn(len(batch.tokens), config.hidden, dtype=torch.float64)
    moved = states.clone()
    moved[130] = torch.randn(config.hidden)
    with torch.no_grad():
        changed = (layer(states, rows) != layer(moved, rows)).any(-1).nonzero().flatten().tolist()
    assert changed == list(range(122, 139))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("base", [10_000.0, 160_000.0])
def test_rotary_positions_are_theirs_to_the_bit(base: float, dtype: torch.dtype) -> None:
    config = TheirConfig(hidden_size=64, num_attention_heads=2, global_rope_theta=base, local_rope_theta=base)
    positions = torch.randint(8192, (1, 50))
    q, k = torch.randn(2, 1, 2, 50, 32).to(dtype)
    cos, sin = modeling_modernbert.ModernBertRotaryEmbedding(config)(q.float(), positions, layer_type="full_attention")
    expected = modeling_modernbert.apply_rotary_pos_emb(q, k, cos, sin)
    by = rotation(positions[0], base, 32)
    for ours, theirs in zip((q, k), expected, strict=True):
        assert torch.equal(rotate(ours[0].transpose(0, 1), by), theirs[0].transpose(0, 1))
