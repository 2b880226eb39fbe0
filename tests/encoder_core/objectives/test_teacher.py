"""Teachers: what they hold likely, for every family; and which of their layers a student begins as."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.modules.teacher import (
    FrozenNetworks,
    Teacher,
    build_teacher,
    evenly_spaced_layers,
    frozen_weights,
    teacher_names_of_student,
)
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, families

DEEP = SIZE | {"layers": 4}
FAMILIES: dict[str, ModelConfig] = {**families(layers=4), "roberta": RobertaConfig(**DEEP)}


def trained(config: ModelConfig) -> MultitaskModel:
    torch.manual_seed(4)
    model = masked_language_model(config)
    initialise(model, std=0.2)
    return model


def taught(config: ModelConfig, model: nn.Module) -> Teacher:
    return build_teacher(config, {name: p.detach() for name, p in model.named_parameters()}).eval()


@pytest.mark.long
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_teacher_scores_as_the_network_it_was(config: ModelConfig) -> None:
    """At the targets, in evaluation mode: to the bit what the network with the head itself says."""
    model = trained(config)
    teacher = taught(config, model)
    assert not any(p.is_meta for p in teacher.parameters())
    batch = make_batch([9, 20, 5], 50, segments=False, seed=3)
    with torch.no_grad():
        states, scores, _ = teacher(batch)
        expected = model.eval().logits(batch)
        torch.testing.assert_close(F.linear(*scores), expected)
        assert torch.equal(states, model.encoder(batch))


def test_frozen_networks_are_no_part_of_their_holder_and_follow_it() -> None:
    frozen = FrozenNetworks[nn.Module]()
    holder = nn.Sequential(nn.Linear(2, 2), frozen)
    teacher = nn.Sequential(nn.Linear(3, 3), Dropout(0.5))
    frozen.set_networks([teacher])
    holder.train()
    assert [name for name, _ in holder.named_parameters()] == ["0.weight", "0.bias"]
    assert not teacher[1].training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert [name for name, _ in frozen_weights(holder)] == ["frozen.0.0.weight", "frozen.0.0.bias"]
    holder.bfloat16()
    assert all(weight.dtype == torch.bfloat16 for _, weight in frozen_weights(holder))
    holder.to("meta")
    assert all(weight.is_meta for _, weight in frozen_weights(holder))


@given(st.integers(1, 24), st.integers(0, 40))
def test_a_student_begins_as_layers_of_its_teacher_in_order(student: int, more: int) -> None:
    teacher = student + more
    layers = evenly_spaced_layers(student, teacher)
    assert len(layers) == student
    assert layers[0] == 0
    assert student == 1 or layers[-1] == teacher - 1
    steps = [b - a for a, b in pairwise(layers)]
    assert all(step >= 1 for step in steps)
    assert not steps or max(steps) - min(steps) <= 1


def test_the_layers_of_distilbert() -> None:
    assert evenly_spaced_layers(6, 12) == (0, 2, 4, 7, 9, 11)
    with pytest.raises(ValueError, match=r"\b2\b.*\b3\b"):
        evenly_spaced_layers(3, 2)


def test_names_of_a_student() -> None:
    names = [name for name, _ in Teacher(BertConfig(**DEEP)).named_parameters()]
    found = teacher_names_of_student(names, (0, 3))
    student = [name for name, _ in Teacher(BertConfig(**DEEP | {"layers": 2})).named_parameters()]
    assert sorted(found) == sorted(student)
    assert found["encoder.layers.1.feed_forward.up.weight"] == "encoder.layers.3.feed_forward.up.weight"
    assert found["encoder.layers.0.feed_forward.up.weight"] == "encoder.layers.0.feed_forward.up.weight"
    assert found["head.dense.weight"] == "head.dense.weight"
