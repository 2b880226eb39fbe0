"""Muon unsharded: torch's own of the same update, and which parameters it moves. With DeepSpeed: test_whole_zero.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from encoder_core.errors import TrainingError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.mlm import masked_language_model
from encoder_core.objectives.plm import permuted_language_model
from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.groups import hidden_matrices, parameter_groups
from encoder_core.optim.matrix_exchange import MatrixExchange
from encoder_core.optim.muon import Muon, MuonConfig
from encoder_core.optim.updates import set_update

SMALL = {"layers": 2, "hidden": 16, "heads": 2, "feed_forward": 32, "max_length": 8, "vocab": 20}
RATE = 0.02


def test_matrices_move_as_torchs_muon_does_and_the_rest_as_adamw() -> None:
    """torch's iterates in bfloat16, so a step agrees to a few percent of its length; ten add up to no more."""
    torch.manual_seed(1)
    matrix, bias = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(24))
    theirs, plain = (nn.Parameter(p.detach().clone()) for p in (matrix, bias))
    groups = [{"params": [matrix], "matrices": True}, {"params": [bias]}]
    config = MuonConfig(lr=RATE)
    ours = Muon(groups, config)
    reference = torch.optim.Muon([theirs], lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW([plain], AdamWConfig(lr=RATE, betas=config.betas, eps=config.eps, weight_decay=0.1))
    start = matrix.detach().clone()
    for count in range(1, 11):
        matrix.grad, bias.grad = torch.randn(24, 40), torch.randn(24)
        # torch normalises by 1 - momentum first, which the iteration takes out again
        theirs.grad, plain.grad = matrix.grad.clone(), bias.grad.clone()
        for optimizer in (ours, adamw):
            set_update(optimizer, lr=RATE, count=count)
            optimizer.step()
        reference.step()
    distance = (matrix.detach() - theirs.detach()).norm() / (matrix.detach() - start).norm()
    assert float(distance) < 0.03
    assert torch.equal(bias, plain)
    assert set(ours.state[matrix]) == {"momentum"}
    assert set(ours.state[bias]) == {"exp_avg", "exp_avg_sq"}


def test_hidden_matrices_are_the_projections_of_layers() -> None:
    roberta = hidden_matrices(masked_language_model(RobertaConfig(**SMALL)))
    layer = {f"attention.{n}.weight" for n in ("query", "key", "value", "output")}
    layer |= {f"feed_forward.{n}.weight" for n in ("up", "down")}
    assert {n.removeprefix("encoder.layers.") for n in roberta} == {f"{i}.{n}" for i in (0, 1) for n in layer}
    xlnet = hidden_matrices(permuted_language_model(XlnetConfig(**SMALL)))
    parts = {n.removeprefix("encoder.layers.0.") for n in xlnet if ".0." in n}
    inside = {f"attention.{n}.weight" for n in ("query", "key", "value", "distance", "output")}
    assert parts == inside | {"up.weight", "down.weight"}


def test_groups_keep_matrices_apart_only_if_asked() -> None:
    model = masked_language_model(RobertaConfig(**SMALL))
    matrices = {id(p) for p in hidden_matrices(model).values()}
    groups = parameter_groups(model, 0.1, matrices=True)
    for group in groups:
        assert {id(p) in matrices for p in group["params"]} == {group["matrices"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert not any(group["matrices"] for group in parameter_groups(model, 0.1))


def test_a_partition_nobody_described_is_an_error() -> None:
    optimizer = Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "matrices": True}], MuonConfig(lr=RATE))
    flat = nn.Parameter(torch.ones(8))
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    set_update(optimizer, lr=RATE, count=1)
    with pytest.raises(TrainingError, match=r"Muon\.shard"):
        optimizer.step()


@given(st.data())
def test_each_matrix_is_made_whole_once_where_much_of_it_lies(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    held = st.lists(st.integers(0, 9), min_size=world, max_size=world).filter(any)
    table = dict(enumerate(data.draw(st.lists(held, max_size=12))))
    work = {matrix: data.draw(st.integers(1, 5)) for matrix in table}
    rounds = MatrixExchange(table).rounds(work)
    owners = {matrix: rank for one in rounds for rank, matrix in enumerate(one) if matrix is not None}
    assert sum(matrix is not None for one in rounds for matrix in one) == len(table)
    assert owners.keys() == table.keys()
    assert all(2 * table[matrix][rank] >= max(table[matrix]) for matrix, rank in owners.items())


@given(st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_work_is_dealt_out_evenly_where_all_hold_alike(world: int, costs: list[int]) -> None:
    """As at stage 3: nobody has more to do than the mean and one matrix."""
    work = dict(enumerate(costs))
    rounds = MatrixExchange({matrix: [3] * world for matrix in work}).rounds(work)
    load = [sum(work[one[rank]] for one in rounds if one[rank] is not None) for rank in range(world)]
    assert max(load) <= sum(costs) / world + max(costs)
