"""Optimizers' kernels on flat tensors as ZeRO lays them out, beside torch's operations: equal, repeated and timed."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from encoder_core.layers.kernel_choice import Kernel, force_kernel
from encoder_core.optim import adamw, muon
from encoder_core.optim.adamw import StableAdamW
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import MuonConfig, StableAdamWConfig
from encoder_core.optim.shards import ShardSegment
from encoder_core.optim.updates import set_update
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.summary import with_vocab
from tests.gpu.machine import DEVICE, GPU, Figure, seconds_of

_STEPS, _RATE = 4, 1e-3
_MAX_UNITS = 1 if GPU else 8  # in the last place: CPUs and the interpreter fuse otherwise


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(adamw, "_supports", lambda p: True)


def _sizes() -> list[int]:
    """Of ModernBERT base's parameters; on a CPU of every twentieth, and much smaller."""
    recipe = load("modernbert-base")
    with torch.device("meta"):
        module = objective_module(with_vocab(recipe.model), recipe.objective)
    sizes = [p.numel() for p in module.parameters()]
    return sizes if GPU else [-(-size // 50_000) for size in sizes[::20]]


def _flat(sizes: list[int]) -> tuple[StableAdamW, nn.Parameter]:
    edges = [0, *accumulate(sizes)]
    generator = torch.Generator(DEVICE).manual_seed(1)
    flat = nn.Parameter(0.02 * torch.randn(edges[-1], generator=generator, device=DEVICE))
    optimizer = StableAdamW([flat], StableAdamWConfig(lr=_RATE, weight_decay=0.1))
    ranges = [ShardSegment(number, 0, *ends) for number, ends in enumerate(pairwise(edges))]
    optimizer.shard({flat: ranges}, [(size,) for size in sizes])
    return optimizer, flat


def _step(optimizer: StableAdamW, kernel: Kernel, count: int) -> None:
    set_update(optimizer, lr=_RATE, count=count)
    with force_kernel(kernel, "update"):
        optimizer.step()


def _trained(kernel: Kernel) -> dict[str, Tensor]:
    """Weights and moments after a few updates, of which the last is clipped."""
    optimizer, flat = _flat(_sizes())
    generator = torch.Generator(DEVICE).manual_seed(2)
    for count in range(1, _STEPS + 1):
        flat.grad = torch.randn(flat.shape, generator=generator, device=DEVICE) * (30 if count == _STEPS else 1)
        _step(optimizer, kernel, count)
    return {"weight": flat.detach(), **optimizer.state[flat]}


def test_stable_adamws_kernels_have_torchs_bits_and_repeat(figure: Figure) -> None:
    """Weights within one unit in the last place of the larger of weight and what was added to it in all."""
    expected, found, again = (_trained(kernel) for kernel in ("written", "fused", "fused"))
    start = _flat(_sizes())[1].detach()
    for name, x in found.items():
        assert torch.equal(x, again[name])
        scale = torch.maximum(x.abs(), (x - start).abs()) if name == "weight" else x.abs()
        unit = torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
        off = (x - expected[name]).abs() / (unit if GPU else unit + 1e-7 * float(x.abs().max()))
        figure(f"{name}: unequal", 100 * float((off > 0).float().mean()), "%")
        figure(f"{name}: furthest off", float(off.max()), "units")
        assert float(off.max()) <= _MAX_UNITS
        assert not GPU or name == "weight" or torch.equal(x, expected[name])


def test_times_of_an_update_in_turns(figure: Figure) -> None:
    optimizer, flat = _flat(_sizes())
    flat.grad = torch.ones_like(flat)
    kernels: tuple[Kernel, ...] = ("written", "fused")
    for turn in range(2):
        for kernel in kernels:
            seconds = seconds_of(lambda kernel=kernel: _step(optimizer, kernel, 2))  # type: ignore[misc]
            figure(f"StableAdamW of {flat.numel():,} numbers, {kernel}, turn {turn}", 1e3 * seconds, "ms")


def _orthogonalised(round_elements: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Muon, list[nn.Parameter]]:
    """BERT base's matrices after a few updates; on a CPU those of a narrow one."""
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", round_elements)
    hidden = 768 if GPU else 24
    generator = torch.Generator(DEVICE).manual_seed(3)
    shapes = 12 * [*4 * [(hidden, hidden)], (4 * hidden, hidden), (hidden, 4 * hidden)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator, device=DEVICE)) for shape in shapes]
    optimizer = Muon([{"params": weights, "matrices": True}], MuonConfig(lr=_RATE))
    for count in range(1, _STEPS + 1):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator, device=DEVICE)
        set_update(optimizer, lr=_RATE, count=count)
        optimizer.step()
    return optimizer, weights


def test_muon_of_all_matrices_together_is_muon_of_each(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterates of a GPU are bfloat16, so updates agree to a percent of their length."""
    (_, alone), (_, together), (_, again) = (_orthogonalised(n, monkeypatch) for n in (1, 2**27, 2**27))
    for one, other, repeated in zip(alone, together, again, strict=True):
        assert torch.equal(other, repeated)
        step = _STEPS * _RATE * 0.2 * one.numel() ** 0.5  # by the root mean square of an update
        assert float((one - other).detach().norm()) <= (0.02 if GPU else 1e-5) * step
    for turn in range(2):
        for name, elements in (("each matrix alone", 1), ("all together", 2**27)):
            optimizer, _ = _orthogonalised(elements, monkeypatch)
            figure(f"Muon of BERT base, {name}, turn {turn}", 1e3 * seconds_of(optimizer.step), "ms")
