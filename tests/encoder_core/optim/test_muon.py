"""Muon: which parameters it moves, and how work is divided. Against its formula: test_whole_zero.py."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import Dispatched
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from encoder_core.families.deberta import DebertaConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.attention import SelfAttention, attend_with_best_kernel
from encoder_core.layers.deberta_attention import FusedProjections
from encoder_core.layers.encoder import GatedFeedForward
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.optim import muon
from encoder_core.optim.groups import hidden_matrices, parameter_groups
from encoder_core.optim.muon import MatrixExchange, Muon
from encoder_core.optim.settings import MuonConfig
from encoder_core.optim.shards import ShardSegment
from encoder_core.optim.updates import set_update

SMALL: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "feed_forward": 32,
    "max_length": 8,
    "vocab": 20,
}
RATE = 0.02
FUSED = (("attention", "qkv.weight"), ("gated", "up.weight"), ("deberta", "content.weight"))


def test_hidden_matrices_are_the_projections_of_layers() -> None:
    roberta = hidden_matrices(masked_language_model(RobertaConfig(**SMALL)))
    layer = {f"attention.{n}.weight" for n in ("query", "key", "value", "output")}
    layer |= {f"feed_forward.{n}.weight" for n in ("up", "down")}
    assert {n.removeprefix("encoder.layers.") for n in roberta} == {f"{i}.{n}" for i in (0, 1) for n in layer}
    xlnet = hidden_matrices(PlmConfig().build(XlnetConfig(**SMALL)))
    parts = {n.removeprefix("encoder.layers.0.") for n in xlnet if ".0." in n}
    inside = {f"attention.{n}.weight" for n in ("query", "key", "value", "distance", "output")}
    assert parts == inside | {"up.weight", "down.weight"}


def test_what_lies_in_one_parameter_counts_one_by_one() -> None:
    modern = hidden_matrices(masked_language_model(ModernBertConfig(**SMALL)))
    first = {n.removeprefix("encoder.layers.0."): its.shapes for n, its in modern.items() if ".0." in n}
    assert first == {
        "attention.qkv.weight": [(16, 16)] * 3,
        "attention.output.weight": [(16, 16)],
        "feed_forward.up.weight": [(32, 16)] * 2,
        "feed_forward.down.weight": [(16, 32)],
    }
    deberta = hidden_matrices(masked_language_model(DebertaConfig(**SMALL)))
    content = [its.shapes for name, its in deberta.items() if name.endswith("content.weight")]
    assert content == [[(16, 16)] * 3] * 2


@pytest.mark.long
@given(heads=st.integers(1, 4), width=st.integers(1, 6), inner=st.integers(1, 9), seed=st.integers(0, 99))
def test_projections_in_one_parameter_move_as_they_would_in_parameters_of_their_own(
    heads: int, width: int, inner: int, seed: int
) -> None:
    """Of attention (ModernBERT's; DeBERTa's, which has them head by head) and of gated blocks."""
    torch.manual_seed(seed)
    hidden = heads * width
    joined = nn.ModuleDict(
        {
            "attention": SelfAttention(hidden, heads, 0.0, attend_with_best_kernel, bias=False, fused=True),
            "gated": GatedFeedForward(hidden, inner, "gelu", dropout=0.0),
            "deberta": FusedProjections(hidden, heads),
        }
    )
    fused = [joined[name].get_parameter(path) for name, path in FUSED]
    deberta = fused[2].detach().view(heads, 3, width, hidden)  # as its authors' view of the product has it
    alone = [
        *fused[0].detach().split(hidden),
        *fused[1].detach().split(inner),
        *(deberta[:, i].flatten(0, 1) for i in range(3)),
    ]
    linears = [nn.Linear(hidden, len(weight), bias=False) for weight in alone]
    separate = nn.ModuleList(linears)
    for linear, weight in zip(linears, alone, strict=True):
        linear.weight.data.copy_(weight)
    gradients = [torch.randn(weight.shape) for weight in alone]
    _step(nn.ModuleDict({"layers": nn.ModuleList([separate])}), list(separate.parameters()), gradients)
    whole = [
        torch.cat(gradients[:3]),
        torch.cat(gradients[3:5]),
        torch.stack([g.view(heads, width, hidden) for g in gradients[5:]], 1).view(3 * hidden, hidden),
    ]
    _step(nn.ModuleDict({"layers": nn.ModuleList([joined])}), fused, whole)
    moved = [linear.weight for linear in separate]
    deberta = fused[2].view(heads, 3, width, hidden)
    found = [
        *fused[0].split(hidden),
        *fused[1].split(inner),
        *(deberta[:, i].flatten(0, 1) for i in range(3)),
    ]
    for weight, its in zip(moved, found, strict=True):
        torch.testing.assert_close(its, weight)


def _step(model: nn.Module, weights: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """One of Muon, of these weights alone."""
    optimizer = Muon(parameter_groups(model, 0.1, matrices=True), MuonConfig(lr=RATE))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    set_update(optimizer, lr=RATE, count=1)
    optimizer.step()


def test_groups_keep_matrices_apart_only_if_asked() -> None:
    model = masked_language_model(RobertaConfig(**SMALL))
    matrices = {id(its.weight) for its in hidden_matrices(model).values()}
    groups = parameter_groups(model, 0.1, matrices=True)
    for group in groups:
        assert {id(p) in matrices for p in group["params"]} == {group["matrices"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert not any(group["matrices"] for group in parameter_groups(model, 0.1))


@given(st.data())
def test_each_matrix_is_made_whole_once_where_much_of_it_lies(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    sizes = st.one_of(st.integers(0, 9), st.integers(0, muon.ROUND_ELEMENTS))
    held = st.lists(sizes, min_size=world, max_size=world).filter(any)
    table = dict(enumerate(data.draw(st.lists(held, max_size=12))))
    work = {matrix: data.draw(st.integers(1, 5)) for matrix in table}
    rounds = MatrixExchange(table).plan_rounds(work)
    owners = [(matrix, rank) for one in rounds for rank, its in enumerate(one) for matrix in its]
    assert sorted(matrix for matrix, _ in owners) == list(table)
    assert all(2 * table[matrix][rank] >= max(table[matrix]) for matrix, rank in owners)
    for its in (its for one in rounds for its in one):
        assert len(its) <= 1 or sum(sum(table[matrix]) for matrix in its) <= muon.ROUND_ELEMENTS


@given(st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_work_is_dealt_out_evenly_where_all_hold_alike(world: int, costs: list[int]) -> None:
    """As at stage 3: nobody has more to do than the mean and one matrix."""
    work = dict(enumerate(costs))
    rounds = MatrixExchange({matrix: [3] * world for matrix in work}).plan_rounds(work)
    load = [sum(work[matrix] for one in rounds for matrix in one[rank]) for rank in range(world)]
    assert max(load) <= sum(costs) / world + max(costs)


def _flat_muon(layers: int) -> Muon:
    """Updates ModernBERT, whose parameters lie end to end as in ZeRO's flat tensors: AdamW's in two, and matrices in
    one for each way to join them."""
    sizes = SMALL | {"layers": layers, "feed_forward": 24}
    groups = parameter_groups(masked_language_model(ModernBertConfig(**sizes)), 0.1, matrices=True)
    shapes = [tuple(p.shape) for group in groups for p in group["params"]]
    segments, number = dict[Tensor, list[ShardSegment]](), 0
    for group in groups:
        parameters = group["params"]
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
        flat.grad = torch.randn(flat.shape)
        edges = pairwise([0, *accumulate(p.numel() for p in parameters)])
        segments[flat] = [ShardSegment(number + i, 0, *its) for i, its in enumerate(edges)]
        number += len(parameters)
        group["params"] = [flat]
    optimizer = Muon(groups, MuonConfig(lr=RATE))
    optimizer.shard(segments, shapes)
    return optimizer


@pytest.fixture
def alone() -> Iterator[None]:
    """The only rank of its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_any_number_of_layers_is_updated_by_40_operations_at_most() -> None:
    """ModernBERT base's: 22 layers, and sides of which one is all matrices' and the other one of two."""
    counts = []
    for layers in (1, 22):
        optimizer = _flat_muon(layers)
        for number in (1, 2):  # the first update makes the momenta
            set_update(optimizer, lr=RATE, count=number)
            with Dispatched() as found:
                optimizer.step()
        counts.append(found.count)
    fills = 1  # a single number, which is not counted on a CPU
    assert counts[0] == counts[1] <= 40 - fills, found.kernels
