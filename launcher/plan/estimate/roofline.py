"""What share of a GPU's peak a microbatch may reach: a roofline over its kernels' FLOPs and bytes (Williams et al.,
2009), with the shares of the peaks that kernels reached on one H200.

Every matrix product takes the longer of two times: that of its FLOPs and that of its bytes. Our attention kernels take
a measured time for each score; they compute scores again in the backward pass (encoder_core/kernels): once for queries,
once for keys, and with relative terms once for their tables. Everything between products is memory traffic. What is
saved for the backward pass is written and read, and so is its gradient: this is the traffic that remains when
operations are fused (`compile`). Layers that are not compiled move more bytes, by a factor that was counted. Logits are
read once for the loss, and once more to become their gradient. Gradients are added up in fp32 after each microbatch.
The update of a step is counted apart (`update_seconds`). Norms and the loss are computed by their kernels. Kernel
launches are not counted: microbatches of few tokens wait for them.

"Measured" below: on one H200 on 2026-11-26 with torch 2.11.0 and Triton 3.6.0, in steps of two microbatches of 32,768
tokens on one rank. tests/bench/RESULTS-gpu.md has them; test_measured_steps.py holds the roofline to later ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import STATE
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.xlnet import XlnetConfig
from launcher.runtime.capacity.devices import GPUS, AssumedUtilisation, Gpu, published
from launcher.runtime.capacity.workload import microbatch_activations, microbatch_flops, microbatch_products
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import trained_tensors

PRODUCTS = 0.74  # of the peak that matrix products reach: measured, 0.72 to 0.77
TRAFFIC = 0.58  # of the memory's bandwidth, by the bytes counted here: measured, 0.5 to 0.67
FLASH = {
    "A100-40": 0.6,  # of the peak: Dao 2023, figures 5 to 7, forward and backward
    "A100-80": 0.6,
    "H100": 0.2,  # measured on an H200 in rows of 512 and 1,024, heads 64 wide: 0.20 and 0.24, in a window 0.17
    "H200": 0.2,
    "B200": 0.1,  # a guess: more than twice the peak, the same rate of instructions
}
FLASH_ELSEWHERE = 0.35  # a guess
FLASH_TILE, FUSED_TILE = 128, 64  # tokens: whole tiles are computed at the edges of a window
FUSED = 0.5  # of flash attention's, in full precision: a guess
# Executed FLOPs, of a forward pass's: scores once more for flash attention, twice for ours, thrice with relative terms.
PASSES = {
    "flash attention": 3.5,
    "fused kernels": 4.5,
    "fused kernels, DeBERTa": 5.8,
    "fused kernels, XLNet": 5.8,
}


class Picoseconds(NamedTuple):
    """Picoseconds of an H200 for each score of a head that is 64 wide, by the kernel that computes the score."""

    forward: float
    queries: float
    keys: float
    tables: float = 0.0

    @property
    def backward(self) -> float:
        return self.queries + self.keys + self.tables


SCORES = {
    "fused kernels": Picoseconds(1.84, 2.05, 2.92),
    "fused kernels, DeBERTa": Picoseconds(6.74, 8.41, 9.90, 18.48),
    "fused kernels, XLNet": Picoseconds(6.34, 10.61, 8.40, 20.24),
}
"""Measured: 32 rows of 512, 12 heads, bf16, dropout 0.1, with the tiles of encoder_core/kernels/tiling.py. BERT's
relative keys were not timed, and are taken for DeBERTa's. Other GPUs are taken to be as much slower as they issue fewer
instructions: a guess."""
_MEASURED, _MEASURED_WIDTH = GPUS["H200"], 64
LOGIT_PASSES = 3  # of a logit: read for the loss, then read and written for the gradient
LOGIT_BYTES = 32  # in fp32, of operations that make copies: what draws ids, or compares with a teacher
KEPT_PASSES = 4  # of what is kept: written and read, and its gradient
ADDED_BYTES = 18  # of a parameter and microbatch: its gradient is cast to fp32 and added to the step's
UPDATED_BYTES = 50  # of a parameter and step: norm, AdamW, weights, zeros for the next gradients
TENSOR_WAIT = 85e-6  # s of a step for each trained tensor; the GPU waits for Python: measured, 54 to 170

PYTHON = {"post-norm": 1.0, "pre-norm": 2.5, "DeBERTa": 1.7, "XLNet": 4.1}
"""Bytes between products of layers that are not compiled, those of compiled ones being 1: counted under a dispatch mode
(tests/launcher/plan/estimate/test_roofline.py), in bf16. Norms of sums are one kernel either way."""

_LOCAL, _CAUSAL = "local attention", "causal attention"
_SCORES = ("attention q k'", _LOCAL, _CAUSAL)
_ATTENTION = (*_SCORES, "scores of relative", "scores of segments")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one microbatch, forward and backward, and the share of the peak that its model FLOPs reach.

    Attributes:
        kernel: name of the kernel that computes attention, a key of `PASSES`.
        products: seconds of the matrix products outside attention.
        bound: the part of `products` that memory bandwidth limits.
        attention: seconds of attention.
        traffic: seconds of the memory traffic between products, and of adding up gradients.
        share: share of the GPU's peak, 0 to 1.
    """

    kernel: str
    products: float
    bound: float
    attention: float
    traffic: float
    share: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.traffic


def roofline(recipe: Recipe, shape: Shape, gpu: Gpu) -> Roofline:
    """Return the roofline of one microbatch of `shape` on `gpu`."""
    half = recipe.precision == "bf16"
    peak, state, kernel = (
        gpu.peak if half else gpu.peak_fp32,
        2 if half else 4,
        attention_kernel(recipe.model),
    )
    every = microbatch_products(recipe, shape)
    outside = [product for product in every if not is_attention(product)]
    bandwidth = TRAFFIC * gpu.bandwidth
    computing = [(p.forward + p.backward) / (PRODUCTS * peak) for p in outside]
    moving = [product_bytes(p, state) / bandwidth for p in outside]
    products = sum(map(max, computing, moving))
    attention = attention_seconds(recipe, shape, gpu)
    added = ADDED_BYTES * sum(trained_tensors(recipe))
    traffic = (traffic_bytes(recipe, shape, state) + added) / bandwidth
    model = sum(p.forward + p.backward for p in every)
    return Roofline(
        kernel=kernel,
        products=products,
        bound=sum(moved for moved, computed in zip(moving, computing, strict=True) if moved > computed),
        attention=attention,
        traffic=traffic,
        share=model / (peak * (products + attention + traffic)),
    )


def attention_seconds(recipe: Recipe, shape: Shape, gpu: Gpu) -> float:
    """Return the seconds of attention in a microbatch.

    They follow from the executed FLOPs or, for our kernels in half precision, from the measured time of a score,
    whichever takes longer.
    """
    half, kernel = recipe.precision == "bf16", attention_kernel(recipe.model)
    peak, tile = gpu.peak if half else gpu.peak_fp32, _tile(kernel)
    flops = sum(
        p.forward * in_tiles(p, shape.length, tile) * (PASSES[kernel] if p.derivatives else 1.0)
        for p in microbatch_products(recipe, shape)
        if is_attention(p)
    )
    computing = flops / (peak * _reached(gpu, kernel, half))
    return max(computing, score_seconds(recipe, shape, kernel, gpu) if half else 0.0)


def score_seconds(recipe: Recipe, shape: Shape, kernel: str, gpu: Gpu) -> float:
    """Return the seconds that our kernels take for the scores of both passes; 0 for other kernels.

    For a network without gradients only the forward pass is counted.
    """
    each = SCORES.get(kernel)
    if each is None:
        return 0.0
    picoseconds = sum(
        scores_of(p)
        * in_tiles(p, shape.length, FUSED_TILE)
        * (each.forward + each.backward * bool(p.derivatives))
        for p in microbatch_products(recipe, shape)
        if p.what.startswith(_SCORES)
    )
    return picoseconds * 1e-12 * _MEASURED.issued / gpu.issued


def scores_of(product: Product) -> float:
    """Return how many scores of a head 64 wide take as long as those of `product`."""
    # Scores and weighted values are counted as two products.
    pairs = product.m * product.n * product.count / 2
    return pairs * max(1.0, product.k / _MEASURED_WIDTH)


def in_tiles(product: Product, length: int, tile: int) -> float:
    """Return how many times the pairs in sight of each other a kernel computes, in rows of `length` tokens.

    That is more than 1 in a window and in causal rows: a tile of queries sees whole tiles of keys.
    """
    if product.what.startswith(_CAUSAL):
        tiles = ceil(length / tile)
        return min(length**2, tiles * (tiles + 1) / 2 * tile**2) / product.n
    if not product.what.startswith(_LOCAL):
        return 1.0
    reach = (product.n / length - 1) / 2
    return min(length, (2 * ceil(reach / tile) + 1) * tile) * length / product.n


def update_seconds(recipe: Recipe, gpu: Gpu, ranks: int = 1) -> float:
    """Return the seconds of a step for its update, without Muon's orthogonalisation: traffic, and waiting for Python.

    `ranks`: number of ranks that share the update under ZeRO.
    """
    tensors = trained_tensors(recipe)
    updated = sum(tensors) / (ranks if recipe.zero else 1)
    return UPDATED_BYTES * updated / (TRAFFIC * gpu.bandwidth) + TENSOR_WAIT * len(tensors)


def step_share(recipe: Recipe, shape: Shape, gpu: Gpu, rounds: int) -> float:
    """Return the share of the peak that a rank's step of `rounds` microbatches reaches, with its update."""
    found = assumed(recipe, shape, gpu)
    if not found.by_roofline:
        return found.share
    peak = gpu.peak if recipe.precision == "bf16" else gpu.peak_fp32
    least = rounds * microbatch_flops(recipe, shape).model / peak
    return least / (least / found.share + update_seconds(recipe, gpu))


def assumed(recipe: Recipe, shape: Shape, gpu: Gpu) -> AssumedUtilisation:
    """Return the utilisation to assume: the roofline's share.

    For networks less than 512 wide, which wait for kernel launches, it is the share of a published run.
    """
    if recipe.model.hidden < 512:
        return published(recipe.model.hidden, shape.length, gpu)
    found = roofline(recipe, shape, gpu)
    return AssumedUtilisation(
        found.share, f"the roofline below, attention by {found.kernel}", by_roofline=True
    )


def arithmetic(recipe: Recipe, shape: Shape, gpu: Gpu) -> Iterator[tuple[str, str, str]]:
    """Yield lines of an estimate, (what, how, result), for the roofline's parts and assumptions."""
    found = roofline(recipe, shape, gpu)
    by_memory = f"{PRODUCTS:.0%} of the peak, {found.bound:.1e} s of it by memory (measured on an H200)"
    yield "  roofline: products", by_memory, f"{found.products:.4f} s"
    yield f"  roofline: {found.kernel}", _attention_formula(recipe, shape, gpu), f"{found.attention:.4f} s"
    factor = python_factor(recipe)
    layers = f"x {factor:g} (layers not compiled)" if recipe.compile is False else "fused"
    between = f"bytes of kept tensors, {layers}, at {TRAFFIC:.0%} of the bandwidth (measured on an H200)"
    yield "  roofline: between products", between, f"{found.traffic:.4f} s"


def _attention_formula(recipe: Recipe, shape: Shape, gpu: Gpu) -> str:
    kernel, half = attention_kernel(recipe.model), recipe.precision == "bf16"
    scores = score_seconds(recipe, shape, kernel, gpu) if half else 0.0
    if scores < attention_seconds(recipe, shape, gpu):
        source = "measured on an H200" if gpu.name == _MEASURED.name else "assumed"
        return f"{PASSES[kernel]} forward passes of it at {_reached(gpu, kernel, half):.1%} of the peak ({source})"
    parts = " + ".join(f"{each:g}" for each in SCORES[kernel] if each)
    slower = "" if gpu.issued == _MEASURED.issued else f", x {_MEASURED.issued / gpu.issued:.2f} (assumed)"
    return f"{parts} ps a score (measured on an H200){slower}"


def _reached(gpu: Gpu, kernel: str, half: bool) -> float:
    """Return the share of the peak that a kernel of attention reaches at most.

    Our kernels multiply by wgmma in half precision, as flash attention does; what slows them is in `SCORES`.
    """
    ours = FUSED if kernel != "flash attention" and not half else 1.0
    return FLASH.get(gpu.name, FLASH_ELSEWHERE) * ours


def _tile(kernel: str) -> int:
    return FLASH_TILE if kernel == "flash attention" else FUSED_TILE


def attention_kernel(model: ModelConfig) -> str:
    """Return the attention kernel that is usual on a GPU in half precision (encoder_core/layers/attention.py)."""
    if isinstance(model, XlnetConfig):
        return "fused kernels, XLNet"
    relative = isinstance(model, BertConfig) and model.position != "absolute"
    if relative or isinstance(model, DebertaConfig | DebertaV2Config):
        return "fused kernels, DeBERTa"
    return "fused kernels" if model.attention_dropout else "flash attention"


def is_attention(product: Product) -> bool:
    """Return whether an attention kernel computes `product`; such a kernel does not store it in memory."""
    return product.what.startswith(_ATTENTION)


def product_bytes(product: Product, state: int) -> int:
    """Return the bytes that `product` moves in both passes: both factors and the result, once each time that it is
    computed.
    """
    numbers = product.m * product.k + product.k * product.n + product.m * product.n
    return state * numbers * product.count * (1 + product.derivatives)


def traffic_bytes(recipe: Recipe, shape: Shape, state: int) -> int:
    """Return the bytes that a microbatch moves between products."""
    kept = [tensor for one in microbatch_activations(recipe, shape) for tensor in one.tensors()]
    states = sum(tensor.bytes(state) for tensor in kept if tensor.width == STATE)
    others = sum(tensor.bytes(state) for tensor in kept if tensor.width != STATE)
    fused = KEPT_PASSES * states + 2 * others
    return round(python_factor(recipe) * fused) + _head_bytes(recipe, shape, state)


def _head_bytes(recipe: Recipe, shape: Shape, state: int) -> int:
    every, objective = microbatch_products(recipe, shape), recipe.objective
    logits = sum(p.m * p.n * p.count for p in every if p.what == "head: scores of all ids")
    copied = objective.rtd is not None or objective.distil is not None
    return (LOGIT_PASSES * state + LOGIT_BYTES * copied) * logits


def python_factor(recipe: Recipe) -> float:
    """Return how many times the bytes of compiled layers the recipe's layers move. It is 1 unless the recipe has
    `compile: false`.
    """
    if recipe.compile is not False:
        return 1.0
    match recipe.model:
        case DebertaConfig() | DebertaV2Config():
            return PYTHON["DeBERTa"]
        case XlnetConfig():
            return PYTHON["XLNet"]
        case PreNormConfig():
            return PYTHON["pre-norm"]
        case _:
            return PYTHON["post-norm"]
