"""The fused attention kernels: compared with the formula in fp64, repeated, timed, and at high offsets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from encoder_core.layers.attention import AttentionKernel, attend_with_best_kernel
from encoder_core.layers.dropout import drop_threshold, dropout, kept_scale
from encoder_core.layers.kernel_choice import force_kernel, record_requests
from encoder_core.layers.rows import Rows
from encoder_core.random_draws import head_keys, uniform_int16, uniforms
from launcher.runtime.preflight.kernels import examine_kernels, local_gpu_name, trial_subject
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.recipe.tiny import tiny
from tests.gpu.machine import DEVICE, DTYPES, GPU, MAX_BIAS, MAX_ERROR, RECIPES, Figure, seconds_of
from tests.gpu.problems import FORMS, Size, error, problem
from tests.support.models.plain_attention import reference
from tests.support.models.relative_attention import Form, Problem, converted, formula, keep_mask, kernels, outcome

_LENGTHS = (0, 1, 33, 130) if GPU else (0, 1, 33)
_LONG_ROW = 8192
_HEADS, _WIDTH = (2, 64) if GPU else (1, 16)
_WIDTHS = (32, 80, 96, 128) if GPU else (5, 24)
_EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 128) if GPU else (3, 15, 16)
_REPEATED_FORMS = [*FORMS] if GPU else ["plain", "deberta", "xlnet-content"]
_REPEATS = 5
_FORMULA_FACTOR = 2.0  # how many times the error of the formula itself, written in the kernel's dtype
_SUITED = [
    (name, rate, scores)
    for name, rate, scores in product(DTYPES, (0.0, 0.1, 0.9), (1.0, 300.0))
    if GPU or name == "fp32" or (rate, scores) == (0.1, 1.0)  # the interpreter is slow
]
_BEYOND = 2**31  # elements
_FAR_BYTES = 70e9  # memory that gradients of tensors beyond that need


def _by_formula(given: Problem, dtype: torch.dtype, *, cancels: bool = True) -> dict[str, Tensor]:
    exact = converted(given, dtype, DEVICE)
    return outcome(formula(exact, cancels=cancels), exact)


def _compare(shape: Form, size: Size) -> None:
    """Compare context and every gradient with the formula in fp64."""
    given = problem(shape, size, DEVICE)
    found = outcome(kernels(given), given)
    exact = _by_formula(given, torch.float64)
    # Large scores make one probability of each query nearly 1, so that its derivatives cancel all but completely.
    scale = None if size.scores == 1.0 else _by_formula(given, torch.float64, cancels=False)
    off, biased = error(found, exact, scale)
    own, _ = error(_by_formula(given, size.dtype), exact, scale)
    bound = max(MAX_ERROR[size.dtype], _FORMULA_FACTOR * own)
    assert off <= bound
    assert biased <= (MAX_BIAS[size.dtype] if scale is None else max(MAX_BIAS[size.dtype], bound))


@pytest.mark.parametrize(("dtype", "rate", "scores"), _SUITED)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_equals_its_formula(form: str, dtype: str, rate: float, scores: float) -> None:
    _compare(FORMS[form], Size(_LENGTHS, _HEADS, _WIDTH, DTYPES[dtype], rate, scores))


@pytest.mark.skipif(not GPU, reason="the interpreter would take hours")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_a_long_row_equals_its_formula(form: str, dtype: str) -> None:
    _compare(FORMS[form], Size((_LONG_ROW,), 1, _WIDTH, DTYPES[dtype], 0.1))
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("form", ["plain", "deberta"])
def test_other_widths_of_heads_equal_the_formula(form: str, width: int, dtype: str) -> None:
    _compare(FORMS[form], Size(_LENGTHS if GPU else (0, 1, 20), 2, width, DTYPES[dtype], 0.1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"] if GPU else ["fp32", "fp16"])
@pytest.mark.parametrize("window", _EDGES)
def test_windows_and_rows_may_end_at_the_edges_of_tiles(window: int, dtype: str) -> None:
    lengths = (window, window + 1, window + 2, 2 * window + 1) if GPU else (window, window + 2)
    _compare(Form(window=window), Size(lengths, 1, _WIDTH, DTYPES[dtype], 0.1))


@pytest.mark.parametrize("form", _REPEATED_FORMS)
def test_repeated_passes_give_equal_bits(form: str) -> None:
    full, few = (
        Size((512, 130, 1, 33) * 8, 2, 64, torch.bfloat16, 0.1),
        Size((20, 5), 2, 8, torch.float32, 0.1),
    )
    given = problem(FORMS[form], full if GPU else few, DEVICE)
    first = outcome(kernels(given), given)
    for _ in range(_REPEATS - 1):
        again = outcome(kernels(given), given)
        assert all(torch.equal(again[key], first[key]) for key in first)


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_masks_of_hidden_states_are_the_cpus(rate: float) -> None:
    keys = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(1))
    draw, threshold = torch.tensor(-(2**61) + 12345), drop_threshold(rate)
    ours = dropout(torch.ones(len(keys), 768, device=DEVICE), rate, keys.to(DEVICE), draw).cpu()
    theirs = (uniform_int16(keys, draw, range(768)) >= threshold - 2**15) * kept_scale(threshold)
    assert torch.equal(ours, theirs.float())
    assert abs(1.0 - float((ours > 0).float().mean()) - rate) <= 5e-3
    assert torch.equal(uniforms(keys.to(DEVICE), draw, 64).cpu(), uniforms(keys, draw, 64))
    assert torch.equal(head_keys(keys.to(DEVICE), range(16)).cpu(), head_keys(keys, range(16)))


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_masks_of_attention_are_the_cpus(rate: float) -> None:
    """Queries of 0 weigh all keys equally, and one-hot values show which keys were kept."""
    length, heads, width = (130 if GPU else 20), 2, 16
    given = problem(Form(), Size((length,), heads, width, torch.float32, rate), DEVICE)
    zero = torch.zeros_like(given.inputs["q"])
    seen = []
    for first in range(0, length, width):
        values = torch.zeros_like(given.inputs["v"])
        here = torch.arange(first, min(first + width, length), device=DEVICE)
        values[here, :, here - first] = 1.0
        inputs = {"q": zero, "k": zero, "v": values}
        seen.append(kernels(replace(given, inputs=inputs))[:, :, : len(here)])
    kept = (torch.cat(seen, -1) > 0).movedim(1, 0).cpu()
    layout = converted(given, torch.float32).layout
    assert torch.equal(kept, keep_mask(layout, torch.arange(length), length, heads))


def test_rows_far_into_memory_have_the_same_bits() -> None:
    """Rows beyond element 2^31 of every tensor. On a CPU only the forward pass is computed: untouched memory costs
    nothing there, and gradients would touch it."""
    heads, width, dtype = 16, 64, torch.bfloat16 if GPU else torch.float16
    lengths = (130, 33) if GPU else (20,)
    near = problem(Form(), Size(lengths, heads, width, dtype, 0.1), DEVICE)
    first = _BEYOND // (heads * width) + 64
    count = first + sum(lengths)
    large = {}
    for name, x in near.inputs.items():
        tensor = torch.empty(count, heads, width, dtype=dtype, device=DEVICE)
        tensor[first:] = x.detach()
        large[name] = tensor.requires_grad_(GPU)
    draws = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    assert near.layout.draws is not None
    draws[first:] = near.layout.draws
    layout = replace(near.layout, cu_seqlens=near.layout.cu_seqlens + first, draws=draws)
    far = Problem(large, layout)
    context, expected = kernels(far), kernels(near)
    assert torch.equal(context[first:], expected)
    if GPU and torch.cuda.get_device_properties(0).total_memory > _FAR_BYTES:
        _compare_far_gradients(far, context, near, expected)


def _compare_far_gradients(far: Problem, context: Tensor, near: Problem, expected: Tensor) -> None:
    gradient, first = torch.zeros_like(context), len(context) - len(expected)
    line = torch.linspace(-1, 1, expected.numel(), device=DEVICE)
    gradient[first:] = line.view_as(expected).to(expected.dtype)
    theirs = torch.autograd.grad(expected, list(near.inputs.values()), gradient[first:].contiguous())
    ours = torch.autograd.grad(context, list(far.inputs.values()), gradient)
    for name, here, there in zip(near.inputs, theirs, ours, strict=True):
        assert torch.equal(there[first:], here), name


@pytest.mark.parametrize("name", RECIPES)
def test_the_trial_of_kernels_finds_them_right(name: str, figure: Figure) -> None:
    """The trial that a run makes at its first start: every attention kernel that the recipe's networks may use."""
    recipe = load(name) if GPU else tiny(load(name))
    subject = trial_subject(recipe, with_vocab(recipe.model))
    verdict = examine_kernels(subject, local_gpu_name() or "CPU", timed=GPU)
    assert not verdict.ended
    for one in verdict.tried:
        what = f"{one.kernel}{' with dropout' if one.dropped else ''}"
        if one.seconds is not None:
            figure(f"{what}, forward and backward", 1e3 * one.seconds, "ms")
        assert one.right, (what, one.failure, one.error, one.bound)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"] if GPU else ["fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_times_of_a_form(form: str, dtype: str, figure: Figure) -> None:
    """On a GPU: 32 rows of 512 with 12 heads; interpreted: one short row."""
    size = Size((512,) * 32, 12, 64, DTYPES[dtype], 0.1) if GPU else Size((16,), 1, 16, DTYPES[dtype], 0.1)
    given = problem(FORMS[form], size, DEVICE)
    flops = 4.0 * sum(n * n for n in size.lengths) * size.heads * size.width
    with torch.no_grad():
        ahead = seconds_of(lambda: kernels(given))
    gradient, leaves = torch.ones_like(given.inputs["q"]), list(given.inputs.values())
    both = seconds_of(lambda: torch.autograd.grad(kernels(given), leaves, gradient))
    assert 0 < ahead < both
    figure("forward", 1e3 * ahead, "ms")
    figure("forward, of two products", flops / ahead / 1e12, "TFLOP/s")
    figure("backward", 1e3 * (both - ahead), "ms")
    figure("backward, of five products", 2.5 * flops / (both - ahead) / 1e12, "TFLOP/s")


@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_dropout_in_turns(causal: bool, figure: Figure) -> None:
    """Full rows by every kernel that is there, against the formula in fp64; forward and backward, timed twice."""
    lengths, heads, width = ((512,) * 32, 12, 64) if GPU else ((16,) * 2, 1, 16)
    dtype = torch.bfloat16 if GPU else torch.float32
    at = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    edges = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    rows = Rows(edges, at, max(lengths), causal=causal)
    draws = torch.Generator().manual_seed(5)
    drawn = torch.randn(3, len(at), heads, width, generator=draws)
    qkv = tuple(x.to(DEVICE, dtype).requires_grad_() for x in drawn.unbind())
    gradient = torch.randn(len(at), heads, width, generator=draws).to(DEVICE, dtype)

    def both(by: AttentionKernel, given: Sequence[Tensor] = qkv) -> dict[str, Tensor]:
        q, k, v = given
        context = by(q, k, v, rows, 0.0)
        found = (context, *torch.autograd.grad(context, given, gradient.to(context)))
        return dict(zip("oqkv", found, strict=True))

    exact = both(reference, [x.detach().double().requires_grad_() for x in qkv])
    with record_requests() as seen:
        both(attend_with_best_kernel)
    usable = [kernel for kernel in seen["attention", False] if kernel != "written"]
    for turn in range(2):
        for kernel in usable:
            with force_kernel(kernel):
                found, again = both(attend_with_best_kernel), both(attend_with_best_kernel)
                assert error(found, exact)[0] <= MAX_ERROR[dtype], kernel
                figure(f"{kernel}, turn {turn}", 1e3 * seconds_of(lambda: both(attend_with_best_kernel)), "ms")
            same = all(torch.equal(found[name], again[name]) for name in found)
            figure(f"{kernel}, bits repeat", float(same), "")
