"""Checks of the fused attention kernels: compiled, compared with the formula in fp64, timed, repeated, and at high
offsets.

On a CPU they run under Triton's interpreter, on short rows, in fp32 and fp16.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from encoder_core.kernels.fused_attention import Layout
from encoder_core.layers.dropout import dropout, inverse_rate, threshold_of
from encoder_core.random_draws import head_keys, numbers16, uniforms
from launcher.plan.burnin import tokenwise
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import device_of, seconds_of
from launcher.plan.burnin.problems import (
    FORMS,
    Form,
    Problem,
    Size,
    error,
    formula,
    kept_by_formula,
    kernels,
    outcome,
    problem,
)
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.summary import known
from launcher.runtime.recipe.tiny import tiny

RATES = (0.0, 0.1, 0.9)
SCORES = (1.0, 300.0)
_GPU_LENGTHS, _CPU_LENGTHS = (0, 1, 33, 130), (0, 1, 33)
_LONG = 8192
# What flash attention's own rounding gives, relative to the whole tensor; and how far off all numbers of it may be
# together: rounding has no direction, so a kernel that is 1 % off is found in bf16, too.
_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
_BIAS = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
_SLACK = 2.0  # how many times the error of the formula itself, written in the kernel's dtype
_HEADS, _WIDTH = 2, 64
_WIDTHS = (32, 80, 96, 128)
_EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 128)
_REPEATS = 5
_BEYOND = 2**31
_FAR_BYTES = 70e9  # that gradients of tensors beyond that need


def form(bench: Bench, name: str) -> None:
    """Check one form of scores in every precision, dropout rate and size of scores, and on long rows."""
    shape = FORMS[name]
    lengths = _GPU_LENGTHS if bench.gpu else _CPU_LENGTHS
    for dtype in _dtypes(bench):
        width, heads = (_WIDTH, _HEADS) if bench.gpu else (16, 1)
        _first(bench, shape, Size((16,), heads, width, dtype, 0.1))
        every = bench.gpu or dtype == torch.float32  # the interpreter is slow
        for rate in RATES if every else RATES[1:2]:
            for scores in SCORES if every else SCORES[:1]:
                size = Size(lengths, heads, width, dtype, rate, scores)
                _hold(bench, shape, size, f"rows of {', '.join(map(str, lengths))}, scores x {scores:g}")
    if bench.gpu:
        for dtype in (torch.bfloat16, torch.float32):
            _hold(bench, shape, Size((_LONG,), 1, _WIDTH, dtype, 0.1), f"a row of {_LONG:,}")
            torch.cuda.empty_cache()


def timed(bench: Bench) -> None:
    """Measure the time of every form, then of the other kernels. On a GPU: 32 rows of 512 with 12 heads; interpreted:
    one short row.
    """
    for name, shape in FORMS.items():
        for dtype in (torch.bfloat16, torch.float16) if bench.gpu else (torch.float32,):
            size = Size((512,) * 32, 12, _WIDTH, dtype, 0.1) if bench.gpu else Size((16,), 1, 16, dtype, 0.1)
            _time(bench, name, shape, size)
    tokenwise.timed(bench)


def _dtypes(bench: Bench) -> tuple[torch.dtype, ...]:
    """Return the dtypes to check; the interpreter does not support bf16."""
    return tuple(_ERROR) if bench.gpu else (torch.float32, torch.float16)


def _first(bench: Bench, shape: Form, size: Size) -> None:
    """Launch a kernel for the first time, which compiles it."""
    what = f"compiled in {_name(size.dtype)}"
    with bench.report.attempt(what):
        began = time.perf_counter()
        given = problem(shape, size, device_of(bench))
        found = outcome(kernels(given), given)
        right = all(bool(x.isfinite().all()) for x in found.values())
        bench.report.holds(what, right, f"{time.perf_counter() - began:.1f} s")


def _hold(bench: Bench, shape: Form, size: Size, rows: str) -> None:
    """Compare context and every gradient with the formula in fp64."""
    what = f"{_name(size.dtype)}, {rows}, dropout {size.dropout:g}"
    with bench.report.attempt(what):
        given = problem(shape, size, device_of(bench))
        found = outcome(kernels(given), given)
        exact = _by_formula(given, torch.float64)
        # Large scores make one probability of each query nearly 1, so that its derivatives cancel all but completely.
        scale = None if size.scores == 1.0 else _by_formula(given, torch.float64, cancels=False)
        off, biased = error(found, exact, scale)
        own, _ = error(_by_formula(given, size.dtype), exact, scale)
        bound = max(_ERROR[size.dtype], _SLACK * own)
        bench.report.at_most(f"{what}: error", off, bound)
        most = _BIAS[size.dtype] if size.scores == 1.0 else max(_BIAS[size.dtype], bound)
        bench.report.at_most(f"{what}: all of it off by", biased, most)


def _by_formula(given: Problem, dtype: torch.dtype, *, cancels: bool = True) -> dict[str, Tensor]:
    exact = given.to(dtype)
    return outcome(formula(exact, cancels=cancels), exact)


def _time(bench: Bench, name: str, shape: Form, size: Size) -> None:
    """Measure the forward pass, and forward and backward passes together."""
    device = device_of(bench)
    what = f"{name}, {_name(size.dtype)}, {len(size.lengths)} rows of {size.lengths[0]}, {size.heads} heads"
    with bench.report.attempt(what):
        given = problem(shape, size, device)
        flops = 4.0 * sum(n * n for n in size.lengths) * size.heads * size.width
        with torch.no_grad():
            ahead = seconds_of(lambda: kernels(given), device)
        gradient = torch.ones_like(given.inputs["q"])
        leaves = list(given.inputs.values())
        both = seconds_of(lambda: torch.autograd.grad(kernels(given), leaves, gradient), device)
        bench.report.figure(f"{what}: forward", 1e3 * ahead, "ms")
        bench.report.figure(f"{what}: forward, of two products", flops / ahead / 1e12, "TFLOP/s")
        bench.report.figure(f"{what}: backward", 1e3 * (both - ahead), "ms")
        bench.report.figure(
            f"{what}: backward, of five products", 2.5 * flops / (both - ahead) / 1e12, "TFLOP/s"
        )


def widths(bench: Bench) -> None:
    """Check heads that are not 64 wide, including widths that need padding."""
    wide, lengths = (_WIDTHS, _GPU_LENGTHS) if bench.gpu else ((5, 24), (0, 1, 20))
    for name in ("plain", "deberta"):
        for width in wide:
            for dtype in _dtypes(bench):
                size = Size(lengths, _HEADS, width, dtype, 0.1)
                _hold(bench, FORMS[name], size, f"{name}, heads of {width}")


def windows(bench: Bench) -> None:
    """Check windows and rows that end at the edges of tiles."""
    edges = _EDGES if bench.gpu else (3, 15, 16)
    for window in edges:
        lengths = (window, window + 1, window + 2, 2 * window + 1) if bench.gpu else (window, window + 2)
        for dtype in _dtypes(bench)[-1:] + _dtypes(bench)[:1]:
            size = Size(lengths, 1, _WIDTH if bench.gpu else 16, dtype, 0.1)
            _hold(bench, Form(window=window), size, f"a window of {window}")


def repeated(bench: Bench) -> None:
    """Check that forward and backward passes give equal bits five times, in whatever order programs run."""
    names = FORMS if bench.gpu else {name: FORMS[name] for name in ("plain", "deberta", "xlnet-content")}
    for name, shape in names.items():
        with bench.report.attempt(name):
            lengths = (512, 130, 1, 33) * 8 if bench.gpu else (20, 5)
            dtype = torch.bfloat16 if bench.gpu else torch.float32
            given = problem(
                shape, Size(lengths, _HEADS, _WIDTH if bench.gpu else 8, dtype, 0.1), device_of(bench)
            )
            first = outcome(kernels(given), given)
            again = [outcome(kernels(given), given) for _ in range(_REPEATS - 1)]
            equal = all(torch.equal(other[key], first[key]) for other in again for key in first)
            bench.report.holds(f"{name}: {_REPEATS} times equal bits", equal)


def drawn(bench: Bench) -> None:
    """Compare every draw of the device with the CPU's, bit for bit."""
    device, report = device_of(bench), bench.report
    keys = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(1))
    draw = torch.tensor(-(2**61) + 12345)
    for rate in RATES[1:]:
        with report.attempt(f"hidden states, rate {rate:g}"):
            x = torch.ones(len(keys), 768)
            ours = dropout(x.to(device), rate, keys.to(device), draw).cpu()
            theirs = (numbers16(keys, draw, range(768)) >= threshold_of(rate) - 2**15) * inverse_rate(
                threshold_of(rate)
            )
            report.holds(f"hidden states, rate {rate:g}: the CPU's mask", torch.equal(ours, theirs.float()))
            share = 1.0 - float((ours > 0).float().mean())
            report.at_most(
                f"hidden states, rate {rate:g}: the share that is dropped is off by", abs(share - rate), 5e-3
            )
        with report.attempt(f"attention, rate {rate:g}"):
            report.holds(f"attention, rate {rate:g}: the CPU's mask", _same_mask(bench, rate))
    with report.attempt("drawn numbers"):
        ours, theirs = uniforms(keys.to(device), draw, 64).cpu(), uniforms(keys, draw, 64)
        report.holds("drawn numbers: the CPU's", torch.equal(ours, theirs))
        heads = head_keys(keys.to(device), range(16)).cpu()
        report.holds("keys of heads: the CPU's", torch.equal(heads, head_keys(keys, range(16))))


def _same_mask(bench: Bench, rate: float) -> bool:
    """Return whether the kernel drops the same probabilities as the formula.

    Queries of 0 weigh all keys equally, and one-hot values show which keys were kept.
    """
    length, heads, device = (130 if bench.gpu else 20), 2, device_of(bench)
    width = 16
    given = problem(Form(), Size((length,), heads, width, torch.float32, rate), device)
    zero = torch.zeros_like(given.inputs["q"])
    seen = []
    for first in range(0, length, width):
        values = torch.zeros_like(given.inputs["v"])
        here = torch.arange(first, min(first + width, length), device=device)
        values[here, :, here - first] = 1.0
        inputs = {"q": zero, "k": zero, "v": values}
        seen.append(kernels(replace(given, inputs=inputs))[:, :, : len(here)])
    kept = (torch.cat(seen, -1) > 0).movedim(1, 0).cpu()
    layout = _on_cpu(given.layout)
    return torch.equal(kept, kept_by_formula(layout, torch.arange(length), length, heads))


def _on_cpu(layout: Layout) -> Layout:
    moved: dict[str, Any] = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in vars(layout).items()}
    return Layout(**moved)


def offsets(bench: Bench) -> None:
    """Check that rows beyond element 2^31 of every tensor have the same bits as the same rows at the beginning.

    On a CPU only the forward pass is checked: untouched memory costs nothing there, and gradients would touch it.
    """
    device, heads, width = device_of(bench), 16, _WIDTH
    dtype = torch.bfloat16 if bench.gpu else torch.float16
    lengths = (130, 33) if bench.gpu else (20,)
    tokens = sum(lengths)
    small = problem(Form(), Size(lengths, heads, width, dtype, 0.1), device)
    first = _BEYOND // (heads * width) + 64
    count = first + tokens
    bench.report.figure("elements of a tensor", float(count * heads * width))
    with bench.report.attempt("rows far into memory"):
        large = {}
        for name, x in small.inputs.items():
            far = torch.empty(count, heads, width, dtype=dtype, device=device)
            far[first:] = x.detach()
            large[name] = far.requires_grad_(bench.gpu)
        layout = replace(small.layout, cu_seqlens=small.layout.cu_seqlens + first)
        draws = torch.zeros(count, dtype=torch.int64, device=device)
        assert small.layout.draws is not None
        draws[first:] = small.layout.draws
        far_problem = Problem(large, replace(layout, draws=draws))
        context, near = kernels(far_problem), kernels(small)
        bench.report.holds("the context's bits", torch.equal(context[first:], near))
        if bench.gpu and torch.cuda.get_device_properties(0).total_memory > _FAR_BYTES:
            _far_gradients(bench, far_problem, context, small, near, first)


def _far_gradients(
    bench: Bench, far: Problem, context: Tensor, near: Problem, small: Tensor, first: int
) -> None:
    gradient = torch.zeros_like(context)
    gradient[first:] = (
        torch.linspace(-1, 1, small.numel(), device=small.device).view_as(small).to(small.dtype)
    )
    theirs = torch.autograd.grad(small, list(near.inputs.values()), gradient[first:].contiguous())
    ours = torch.autograd.grad(context, list(far.inputs.values()), gradient)
    for name, here, there in zip(near.inputs, theirs, ours, strict=True):
        bench.report.holds(f"the bits of the gradient by {name}", torch.equal(there[first:], here))


def trial(bench: Bench) -> None:
    """Run the trial that a run makes at its first start: every attention kernel that the recipes' networks may use."""
    from launcher.runtime.preflight.kernels import examine_kernels, gpu_here, subject_of

    gpu = gpu_here() if bench.gpu else None
    for name in bench.request.recipes:
        with bench.report.attempt(name):
            recipe = load(name) if bench.gpu else tiny(load(name))
            subject = subject_of(recipe, known(recipe.model))
            verdict = examine_kernels(subject, gpu or "CPU", {}, lambda kernel: None, timed=bench.gpu)
            for one in verdict.tried:
                what = f"{name}: {one.kernel}{' with dropout' if one.dropped else ''}"
                if one.failure or one.error is None:
                    bench.report.holds(what, one.right, one.failure or "computes")
                elif one.right:
                    bench.report.figure(f"{what}: error", one.error)
                else:
                    bench.report.at_most(f"{what}: error", one.error, one.bound)
                if one.seconds is not None:
                    bench.report.figure(f"{what}: forward and backward", 1e3 * one.seconds, "ms")


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
