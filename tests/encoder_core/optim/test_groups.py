"""Who decays, who has a trust ratio, and who learns more slowly, on a real model."""

from typing import Any

import pytest
from torch import nn

from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.optim.groups import parameter_groups

CONFIG = RobertaConfig(layers=3, hidden=16, heads=2, feed_forward=32, max_length=8, vocab=20)
XLNET = XlnetConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=8, vocab=20)


@pytest.fixture
def model() -> MultitaskModel:
    return masked_language_model(CONFIG)


def _by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in groups for p in group["params"]}


def test_every_parameter_is_in_exactly_one_group(model: MultitaskModel) -> None:
    placed = [id(p) for group in parameter_groups(model, 0.01) for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters())


def test_layer_norms_and_biases_neither_decay_nor_scale(model: MultitaskModel) -> None:
    groups = _by_name(model, parameter_groups(model, 0.01))
    for name, group in groups.items():
        plain = name.endswith("bias") or "norm" in name
        assert group["weight_decay"] == (0.0 if plain else 0.01), name
        assert group["trust_ratio"] == (not plain), name
        assert group["lr_scale"] == 1.0
    assert len(parameter_groups(model, 0.01)) == 2


def test_fairseq_decays_every_parameter_and_trust_ratios_stay(model: MultitaskModel) -> None:
    groups = _by_name(model, parameter_groups(model, 0.01, decayed="all"))
    for name, group in groups.items():
        assert group["weight_decay"] == 0.01, name
        assert group["trust_ratio"] == (not (name.endswith("bias") or "norm" in name)), name


def test_xlnet_decays_the_biases_of_attention_and_no_other_bias() -> None:
    xlnet = PlmConfig().build(XLNET)
    groups = _by_name(xlnet, parameter_groups(xlnet, 0.01, decayed="xlnet"))
    attention = ("content_bias.bias", "distance_bias.bias", "segment_bias.bias")
    decaying = {name for name, group in groups.items() if group["weight_decay"]}
    assert sum(name.endswith(attention) for name in decaying) == 3 * XLNET.layers
    for name in groups:
        plain = name.endswith("bias") or "norm" in name
        assert (name in decaying) == (not plain or name.endswith(attention)), name
    others = _by_name(xlnet, parameter_groups(xlnet, 0.01))
    assert not any(group["weight_decay"] for name, group in others.items() if name.endswith(attention))


def test_turns_keep_their_order_and_share_no_group(model: MultitaskModel) -> None:
    head = list(model.head.parameters())
    first = [p for p in model.parameters() if all(p is not other for other in head)]
    groups = parameter_groups(model, 0.01, update_groups={"second": head, "first": first})
    assert [group["update_group"] for group in groups] == ["second", "second", "first", "first"]
    placed = _by_name(model, groups)
    assert all(
        (group["update_group"] == "first") == name.startswith("encoder.")
        for name, group in placed.items()
        if "word" not in name
    )
    assert {group["update_group"] for group in parameter_groups(model, 0.01)} == {"all"}
