"""The roofline: its bytes against those that operations touch, and figures that must hang together."""

from collections import Counter
from dataclasses import replace

import pytest
from dispatched import is_view
from gpu_path import as_on_a_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from encoder_core.cost.flops import products
from encoder_core.cost.products import Shape
from encoder_core.families.pre_norm import PreNormConfig
from launcher.estimate.cluster import find_gpu
from launcher.estimate.roofline import (
    is_attention,
    product_bytes,
    roofline,
    traffic_bytes,
    warp_instructions,
)
from launcher.estimate.workload import microbatch_shape, terms
from launcher.recipe.load import load
from launcher.recipe.summary import known
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns

SHAPE, STATE = Shape(4, 64, 8), 4
WIDE = {"hidden": 64, "feed_forward": 256, "max_length": 128, "dropout": 0.0, "attention_dropout": 0.0}
FAMILIES = {
    *("roberta", "spanbert", "albert", "electra", "deberta", "deberta v2", "modernbert", "eurobert", "xlm"),
    *("xlnet", "bert with relative keys"),
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "convolution", "convolution_backward"}
ROWS = {"embedding", "index_select", "gather", "index"}


class Bytes(TorchDispatchMode):
    """What each operation reads and writes; of a table only the rows that are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not is_view(func) and not name.startswith(("empty", "new_empty", "detach")):
            read, written = (sum(map(_size, tree_leaves(x))) for x in ((args, kwargs), out))
            self.found["products" if name in PRODUCTS else "others"] += (
                2 * written if name in ROWS else read + written
            )
        return out


def _size(x: object) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) if isinstance(x, Tensor) else 0


@pytest.mark.heavy
@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if n.name in FAMILIES], ids=lambda network: network.name
)
def test_bytes_are_those_that_operations_touch(network: Network) -> None:
    """Of products within an eighth. Between them less than without fusing, whose norms, activations and sums each read
    and write by themselves: a sixth to all of it."""
    changes = WIDE | ({"attention_output_dropout": 0.0} if isinstance(network.model, PreNormConfig) else {})
    network = replace(network, model=network.model.model_copy(update=changes))
    module, batch = build(network), full_rows(network, SHAPE)
    remembered = memory(network, module, batch)
    with as_on_a_gpu(module, lambda name: None), Bytes() as bytes_of:
        for losses in turns(module, batch, remembered):
            sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
    plm = network.objective.plm is not None
    every = products(network.model, network.terms, SHAPE, backwards=plm)
    counted = sum(product_bytes(product, STATE) for product in every if not is_attention(product))
    assert counted == pytest.approx(bytes_of.found["products"], rel=0.125)
    recipe = load("xlnet-base" if plm else "roberta-base")
    recipe = recipe.model_copy(update={"model": network.model, "objective": network.objective})
    between = traffic_bytes(recipe, SHAPE, STATE)
    assert bytes_of.found["others"] / 6 < between < 1.2 * bytes_of.found["others"]


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200", "A100-80", "L40S", "MI300X"])
def test_shares_are_shares_and_attention_with_relative_terms_costs_more(gpu: str) -> None:
    shares = {}
    for name in ("bert-large", "deberta-v3-large", "xlnet-large"):
        recipe = load(name)
        recipe = recipe.model_copy(update={"model": known(recipe.model), "precision": "bf16"})
        found = roofline(recipe, Shape(32, 512, 77), find_gpu(gpu))
        shares[name] = found.share
        assert 0.05 < found.share < 0.7
        assert found.seconds == found.products + found.attention + found.traffic
    assert shares["deberta-v3-large"] < shares["bert-large"]


def test_attention_with_dropout_takes_what_its_instructions_take() -> None:
    """RoBERTa base, rows of 512: 12 heads x 512 scores a token and layer, 1.56 + 1.59 + 1.88 instructions each."""
    recipe, gpu = load("roberta-base"), find_gpu("H100")
    recipe = recipe.model_copy(update={"model": known(recipe.model), "precision": "bf16"})
    shape = Shape(8, 512, 77)
    scores = 12 * 512 * shape.tokens * 12
    expected = scores * 5.03 / (0.65 * 4 * 132 * 1.755e9)
    assert roofline(recipe, shape, gpu).attention == pytest.approx(expected)
    evaluated = [replace(p, derivatives=0) for p in products(recipe.model, terms(recipe.objective), shape)]
    assert warp_instructions(evaluated, "fused kernels") == pytest.approx(scores * 1.56)


def test_more_bandwidth_makes_it_quicker() -> None:
    recipe = load("roberta-large-160gb")
    shape = microbatch_shape(recipe, recipe.phases[0])
    h100, h200 = (roofline(recipe, shape, find_gpu(gpu)) for gpu in ("H100", "H200"))
    assert h200.traffic == pytest.approx(h100.traffic * 3350 / 4800)
    assert h200.attention == h100.attention
