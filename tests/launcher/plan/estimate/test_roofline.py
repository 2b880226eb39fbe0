"""The roofline: its bytes against those that operations touch, and figures that must hang together."""

from collections import Counter
from dataclasses import replace

import operations
import pytest
from dispatched import is_view
from gpu_path import as_on_a_gpu
from step_batch import in_random_order, make_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from encoder_core.cost.products import Product, Shape
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.terms.composition import products
from launcher.plan.estimate.roofline import (
    LOGIT_PASSES,
    PYTHON,
    TENSOR_WAIT,
    attention_seconds,
    in_tiles,
    is_attention,
    product_bytes,
    python_factor,
    roofline,
    step_share,
    traffic_bytes,
    update_seconds,
)
from launcher.runtime.capacity.devices import find_gpu
from launcher.runtime.capacity.workload import microbatch_shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.summary import known, trained_tensors
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns

SHAPE, STATE = Shape(4, 64, 8), 4
WIDE = {"hidden": 64, "feed_forward": 256, "max_length": 128, "dropout": 0.0, "attention_dropout": 0.0}
FAMILIES = {
    *("roberta", "spanbert", "albert", "electra", "deberta", "deberta v2", "modernbert", "eurobert", "xlm"),
    *("xlnet", "bert with relative keys"),
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "convolution", "convolution_backward"}
FILLS = {"zeros_like", "new_zeros", "zeros", "full", "fill_", "zero_"}
ROWS = {"embedding", "index_select", "gather", "index"}


class Bytes(TorchDispatchMode):
    """What each operation reads and writes; of a table only the rows that are picked. Kernels that are not launched are
    not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not is_view(func) and not name.startswith(("empty", "new_empty", "detach")):
            read, written = (sum(map(_size, tree_leaves(x))) for x in ((args, kwargs), out))
            read = 0 if name in FILLS else read
            self.found["products" if name in PRODUCTS else "others"] += (
                2 * written if name in ROWS else read + written
            )
        return out


def _size(x: object) -> int:
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) if isinstance(x, Tensor) else 0


def of_norms(launched: list[str], states: int, state: int) -> int:
    """Bytes of the kernels of residual, dropout and norm: four numbers of a state forward, and four backward."""
    return launched.count("norm forward") * 8 * state * states


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
    launched: list[str] = []
    with as_on_a_gpu(module, launched.append), Bytes() as bytes_of:
        for losses in turns(module, batch, remembered):
            sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
    plm = network.objective.plm is not None
    every = products(network.model, network.objective.terms, replace(SHAPE, backwards=plm))
    counted = sum(product_bytes(product, STATE) for product in every if not is_attention(product))
    assert counted == pytest.approx(bytes_of.found["products"], rel=0.125)
    recipe = load("xlnet-base" if plm else "roberta-base")
    recipe = recipe.model_copy(update={"model": network.model, "objective": network.objective})
    logits = sum(p.m * p.n * p.count for p in every if p.what == "head: scores of all ids")
    between = (
        traffic_bytes(recipe, SHAPE, STATE) - LOGIT_PASSES * STATE * logits
    )  # by kernels that are not launched
    moved = bytes_of.found["others"] + of_norms(launched, SHAPE.tokens * network.model.hidden, STATE)
    assert moved / 6 < between < 1.2 * moved


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "kind"),
    [("RoBERTa", "post-norm"), ("ModernBERT", "pre-norm"), ("DeBERTa v2", "DeBERTa"), ("XLNet", "XLNet")],
)
def test_layers_that_are_not_compiled_move_so_many_times_as_much(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a third layer adds, in bf16."""
    monkeypatch.setattr(
        "encoder_core.kernels.residual_norm._PROGRAMS", 1
    )  # its sums are small where tokens are many
    published, shape = load(operations.RECIPES[family]).model, Shape(4, 64, 8)
    size = {"hidden": 128, "heads": 2, "feed_forward": 128 * published.feed_forward // published.hidden}
    recipe = operations.small(operations.RECIPES[family])
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=size), "compile": False})
    moved, kept = [], []
    for deep in (operations.with_layers(recipe, layers) for layers in (2, 3)):
        launched: list[str] = []
        module, batch = operations.built(deep).bfloat16(), make_batch([shape.length] * shape.rows, 500)
        batch = in_random_order(batch) if family == "XLNet" else batch
        with as_on_a_gpu(module, launched.append), Bytes() as bytes_of:
            for term in module(batch).terms:
                term.loss_sum.backward(retain_graph=True)
        moved.append(bytes_of.found["others"] + of_norms(launched, shape.tokens * size["hidden"], 2))
        compiled = deep.model_copy(update={"compile": "auto"})
        kept.append(traffic_bytes(compiled, shape, 2))
        assert traffic_bytes(deep, shape, 2) >= kept[-1]
    assert python_factor(recipe) == PYTHON[kind]
    assert (moved[1] - moved[0]) / (kept[1] - kept[0]) == pytest.approx(PYTHON[kind], rel=0.15)


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


def test_attention_with_dropout_takes_the_measured_time_of_its_scores() -> None:
    """RoBERTa base, rows of 512: 12 heads x 512 scores a token and layer, 1.84 + 2.05 + 2.92 ps each on an H200. A GPU
    that issues half as many instructions a second takes twice as long.
    """
    recipe, gpu = load("roberta-base"), find_gpu("H200")
    recipe = recipe.model_copy(update={"model": known(recipe.model), "precision": "bf16"})
    shape = Shape(8, 512, 77)
    scores = 12 * 512 * shape.tokens * 12
    assert attention_seconds(recipe, shape, gpu) == pytest.approx(scores * 6.81e-12)
    slower = replace(gpu, issued=gpu.issued / 2)
    assert attention_seconds(recipe, shape, slower) == pytest.approx(scores * 13.62e-12)
    assert roofline(recipe, shape, gpu).attention == attention_seconds(recipe, shape, gpu)


def test_a_window_is_computed_in_whole_tiles() -> None:
    """64 tokens to each side: tiles of 128 queries see three of keys, so do tiles of 64; a short row has no more than
    its own pairs.
    """
    pairs = 1024 * 129 - 64 * 65
    local = Product("local attention q k' and p v", 1, 64, pairs, 2)
    assert in_tiles(local, 1024, 128) == pytest.approx(3 * 128 * 1024 / pairs)
    assert in_tiles(local, 1024, 64) == pytest.approx(3 * 64 * 1024 / pairs)
    assert in_tiles(replace(local, n=100 * 100), 100, 128) == 1.0
    assert in_tiles(replace(local, what="attention q k' and p v"), 1024, 128) == 1.0


def test_an_update_costs_more_of_a_step_with_few_microbatches() -> None:
    recipe, gpu = load("bert-large"), find_gpu("H200")
    recipe = recipe.model_copy(update={"model": known(recipe.model), "precision": "bf16"})
    shape = Shape(64, 512, 77)
    alone = roofline(recipe, shape, gpu)
    update = update_seconds(recipe, gpu)
    for rounds in (1, 2, 32):
        expected = alone.share * rounds * alone.seconds / (rounds * alone.seconds + update)
        assert step_share(recipe, shape, gpu, rounds) == pytest.approx(expected)
    assert recipe.zero
    waiting = TENSOR_WAIT * len(trained_tensors(recipe))
    assert update_seconds(recipe, gpu, 8) - waiting == pytest.approx((update - waiting) / 8)


def test_more_bandwidth_makes_it_quicker() -> None:
    recipe = load("roberta-large-160gb")
    shape = microbatch_shape(recipe, recipe.phases[0])
    h100, h200 = (roofline(recipe, shape, find_gpu(gpu)) for gpu in ("H100", "H200"))
    assert h200.traffic == pytest.approx(h100.traffic * 3350 / 4800)
    assert h200.attention == h100.attention
