"""What share of a GPU's peak a microbatch may reach: a roofline over its kernels' FLOPs and bytes (Williams et al.,
2009).

Every matrix product takes the longer of two times: that of its FLOPs and that of its bytes. Attention computes scores
again in the backward pass, as its kernels do (encoder_core/kernels): once for queries, once for keys, and with
relative terms once for their tables. The instructions around the products slow these kernels, and are counted.
Everything between products is memory traffic. What is saved for the backward pass is written and read, and so is its
gradient: this is the traffic that remains when operations are fused (`compile`). Layers that are not compiled move
more bytes, by a factor that was counted. Logits are read once for the loss, and once more to become their gradient.
The shares of the peaks that kernels reach are assumptions, stated below. Kernel launches, the optimizer and waiting
are not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import STATE
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.xlnet import XlnetConfig
from launcher.runtime.capacity.devices import AssumedUtilisation, Gpu, published
from launcher.runtime.capacity.workload import microbatch_activations, microbatch_products
from launcher.runtime.recipe.schema import Recipe

PRODUCTS = 0.7  # of the peak that large matrix products reach: a guess
TRAFFIC = 0.8  # of the memory's bandwidth: a guess
FLASH = {"A100-40": 0.6, "A100-80": 0.6}  # of the peak: Dao 2023, figures 5 to 7, forward and backward
FLASH_ELSEWHERE = 0.35  # Shah et al. 2024 of FlashAttention-2 on an H100; a guess for others
FUSED = 0.5  # of flash attention's, in full precision: a guess, no GPU has run the kernels
# Executed FLOPs, of a forward pass's: scores once more for flash attention, twice for ours, thrice with relative terms.
PASSES = {"flash attention": 3.5, "fused kernels": 4.5, "fused kernels, relative": 5.8}
ISSUED = 0.65  # of the instructions that a GPU can issue, while our kernels run: a guess


class Instructions(NamedTuple):
    """Instructions of whole warps for each score of a head that is 64 wide, by the kernel that computes the score.

    Counted in what the kernels compile to for an H100 (tests/bench/kernels.py), in half precision with dropout.
    """

    forward: float
    queries: float
    keys: float
    tables: float = 0.0

    @property
    def backward(self) -> float:
        return self.queries + self.keys + self.tables


INSTRUCTIONS = {
    "fused kernels": Instructions(1.56, 1.59, 1.88),
    "fused kernels, relative": Instructions(4.9, 5.1, 5.3, 9.8),
}
_COUNTED_WIDTH = 64
LOGIT_PASSES = 3  # of a logit: read for the loss, then read and written for the gradient
LOGIT_BYTES = 32  # in fp32, of operations that make copies: what draws ids, or compares with a teacher
KEPT_PASSES = 4  # of what is kept: written and read, and its gradient

PYTHON = {"post-norm": 1.2, "pre-norm": 2.5, "DeBERTa": 2.3, "XLNet": 4.3}
"""Bytes between products of layers that are not compiled, those of compiled ones being 1: counted under a dispatch mode
(tests/launcher/plan/estimate/test_roofline.py), in bf16. Norms of sums are one kernel either way."""

_SCORES = ("attention q k'", "local attention")
_ATTENTION = (*_SCORES, "scores of relative", "scores of segments")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one microbatch, forward and backward, and the share of the peak that its model FLOPs reach.

    Attributes:
        kernel: name of the kernel that computes attention, a key of `PASSES`.
        products: seconds of the matrix products outside attention.
        bound: the part of `products` that memory bandwidth limits.
        attention: seconds of attention.
        traffic: seconds of the memory traffic between products.
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
    attention = attention_seconds(recipe, every, kernel, gpu)
    traffic = traffic_bytes(recipe, shape, state) / bandwidth
    model = sum(p.forward + p.backward for p in every)
    return Roofline(
        kernel=kernel,
        products=products,
        bound=sum(moved for moved, computed in zip(moving, computing, strict=True) if moved > computed),
        attention=attention,
        traffic=traffic,
        share=model / (peak * (products + attention + traffic)),
    )


def attention_seconds(recipe: Recipe, every: list[Product], kernel: str, gpu: Gpu) -> float:
    """Return the seconds of attention in a microbatch.

    They follow from the executed FLOPs or, for our kernels in half precision, from the issued instructions, whichever
    takes longer.
    """
    half = recipe.precision == "bf16"
    peak = gpu.peak if half else gpu.peak_fp32
    flops = sum(p.forward * (PASSES[kernel] if p.derivatives else 1.0) for p in every if is_attention(p))
    computing = flops / (peak * _reached(gpu, kernel, half))
    issued = warp_instructions(every, kernel) if half else 0.0
    return max(computing, issued / (ISSUED * gpu.issued))


def warp_instructions(every: list[Product], kernel: str) -> float:
    """Return how many warp instructions our kernels issue in both passes; 0 for other kernels.

    For a network without gradients only the forward pass is counted.
    """
    each = INSTRUCTIONS.get(kernel)
    if each is None:
        return 0.0
    return sum(
        p.m
        * p.n
        * p.count
        / 2  # scores and weighted values are counted as two products
        * max(1.0, p.k / _COUNTED_WIDTH)
        * (each.forward + each.backward * bool(p.derivatives))
        for p in every
        if p.what.startswith(_SCORES)
    )


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
    by_memory = f"{PRODUCTS:.0%} of the peak, {found.bound:.1e} s of it by memory (assumed)"
    yield "  roofline: products", by_memory, f"{found.products:.4f} s"
    yield f"  roofline: {found.kernel}", _attention_formula(recipe, shape, gpu), f"{found.attention:.4f} s"
    factor = python_factor(recipe)
    layers = "fused" if factor == 1.0 else f"x {factor:g} (layers not compiled)"
    between = f"bytes of kept tensors, {layers}, at {TRAFFIC:.0%} of the bandwidth (assumed)"
    yield "  roofline: between products", between, f"{found.traffic:.4f} s"


def _attention_formula(recipe: Recipe, shape: Shape, gpu: Gpu) -> str:
    kernel, half = attention_kernel(recipe.model), recipe.precision == "bf16"
    issued = warp_instructions(microbatch_products(recipe, shape), kernel) if half else 0.0
    if not issued:
        reached = _reached(gpu, kernel, half)
        return f"{PASSES[kernel]} forward passes of it at {reached:.1%} of the peak (assumed)"
    each = INSTRUCTIONS[kernel]
    parts = " + ".join(f"{count:g}" for count in each if count)
    return f"{parts} instructions a score: {issued:.2e} / ({ISSUED} (assumed) x {gpu.issued / 1e9:,.0f}e9 a second)"


def _reached(gpu: Gpu, kernel: str, half: bool) -> float:
    """Return the share of the peak that a kernel of attention reaches.

    Our kernels multiply by wgmma in half precision, as flash attention does; what slows them is counted as
    instructions.
    """
    ours = FUSED if kernel != "flash attention" and not half else 1.0
    return FLASH.get(gpu.name, FLASH_ELSEWHERE) * ours


def attention_kernel(model: ModelConfig) -> str:
    """Return the attention kernel that is usual on a GPU in half precision (encoder_core/layers/attention.py)."""
    relative = isinstance(model, BertConfig) and model.position != "absolute"
    if relative or isinstance(model, DebertaConfig | DebertaV2Config | XlnetConfig):
        return "fused kernels, relative"
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
