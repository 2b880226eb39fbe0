"""StableAdamW's kernels under Triton's interpreter, against torch's roundings on a GPU, and how many they are."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")
from dispatched import Dispatched
from gpu_path import launched
from triton.runtime import interpreter

from encoder_core.layers.kernel_choice import force_kernel
from encoder_core.optim import adamw
from encoder_core.optim.adamw import StableAdamW
from encoder_core.optim.settings import StableAdamWConfig
from encoder_core.optim.shards import ShardSegment
from encoder_core.optim.updates import set_update
from launcher.runtime.rank.build import build_optimizer
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.summary import with_vocab

LAUNCHES = 40  # of an update of ModernBERT base, at most
STEPS, PADDING = 4, 5


@pytest.fixture(autouse=True)
def exact_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds the product of a multiply-add, as no GPU does. Kernels take CPU tensors here."""

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    monkeypatch.setattr(adamw, "_supports", lambda p: True)


def flat_of(sizes: list[int], config: StableAdamWConfig) -> tuple[StableAdamW, nn.Parameter]:
    """Parameters of these sizes end to end, and padding behind them."""
    edges = [0, *accumulate(sizes)]
    flat = nn.Parameter(torch.randn(edges[-1] + PADDING, generator=torch.Generator().manual_seed(len(sizes))))
    optimizer = StableAdamW([flat], config)
    ranges = [ShardSegment(number, 0, *ends) for number, ends in enumerate(pairwise(edges))]
    optimizer.shard({flat: ranges}, [(size,) for size in sizes])
    return optimizer, flat


def rounded(x: Tensor) -> Tensor:
    return x.float().double()


def single(number: float) -> Tensor:
    """A number as a kernel takes it."""
    return torch.tensor(number).double()


class AsOnGpu:
    """The written update of one parameter as torch's kernels for GPUs round it: each operation to fp32, where what
    they compute by one multiply-add is rounded once. Sums are exact."""

    def __init__(self, weight: Tensor, config: StableAdamWConfig) -> None:
        self.weight, self.config = weight.double(), config
        self.first = self.second = torch.zeros_like(self.weight)

    def step(self, g: Tensor, count: int) -> None:
        (beta1, beta2), config, g = self.config.betas, self.config, g.double()
        self.first = rounded(rounded(self.first * single(beta1)) + g * single(1 - beta1))
        self.second = rounded(rounded(self.second * single(beta2)) + rounded(g * g) * single(1 - beta2))
        expected = rounded(rounded(self.second * single(1 / (1 - beta2**count))).sqrt()).clamp(single(config.eps))
        rms = rounded(g / expected).square().mean().sqrt()
        share = single(float(1 / rms.clamp(min=1)))
        root = rounded(rounded(self.second.sqrt()) * single((1 - beta2**count) ** -0.5))
        direction = rounded(rounded(self.first / rounded(root + single(config.eps))) * single(1 / (1 - beta1**count)))
        direction = rounded(rounded(direction + self.weight * single(config.weight_decay)) * share)
        self.weight = rounded(self.weight + direction * single(-config.lr))


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 30) | st.sampled_from([2047, 2048, 2049, 5000]), min_size=1, max_size=6),
    st.sampled_from([1e-4, 0.01, 1.0]),
    st.floats(-3, 3),
    st.integers(0, 99),
)
@example([1, 0, 2049, 3], 0.01, 0.0, 1)
def test_every_bit_is_that_of_torchs_operations_on_a_gpu(sizes: list[int], lr: float, scale: float, seed: int) -> None:
    """Weights may differ by one unit, where rms is a sum in another order."""
    config = StableAdamWConfig(lr=lr, weight_decay=0.1)
    optimizer, flat = flat_of(sizes, config)
    edges, draws = [0, *accumulate(sizes)], torch.Generator().manual_seed(seed)
    parts = [slice(*ends) for ends in pairwise(edges) if ends[0] < ends[1]]
    expected = [AsOnGpu(flat.detach()[part], config) for part in parts]
    padding = flat.detach()[edges[-1] :].clone()
    for count in range(1, STEPS + 1):
        flat.grad = torch.randn(flat.shape, generator=draws) * 10.0 ** (scale * (count == STEPS))
        set_update(optimizer, lr=lr, count=count)
        with force_kernel("fused", "update"):
            optimizer.step()
        for part, its in zip(parts, expected, strict=True):
            its.step(flat.grad[part], count)
    for part, its in zip(parts, expected, strict=True):
        assert torch.equal(optimizer.state[flat]["exp_avg"][part].double(), its.first)
        assert torch.equal(optimizer.state[flat]["exp_avg_sq"][part].double(), its.second)
        unit = torch.nextafter(its.weight.float().abs(), torch.tensor(torch.inf)).double() - its.weight.abs()
        assert bool(((flat.detach()[part].double() - its.weight).abs() <= unit).all())
    assert torch.equal(flat.detach()[edges[-1] :], padding)


def modernbert() -> StableAdamW:
    """Of ModernBERT base, in flat tensors as ZeRO lays them out, of parameters that are all as long as their number."""
    recipe = load("modernbert-base")
    with torch.device("meta"):
        module = objective_module(with_vocab(recipe.model), recipe.objective)
    optimizer = build_optimizer(recipe, module)
    assert isinstance(optimizer, StableAdamW)
    ranges, first = dict[torch.Tensor, list[ShardSegment]](), 0
    for group in optimizer.param_groups:
        edges = [0, *accumulate(range(first + 1, first + 1 + len(group["params"])))]
        flat = nn.Parameter(torch.ones(edges[-1]))
        ranges[flat] = [ShardSegment(first + i, 0, *ends) for i, ends in enumerate(pairwise(edges))]
        group["params"], flat.grad, first = [flat], torch.ones_like(flat), first + len(ranges[flat])
    assert first == len(list(module.parameters())) == 137
    optimizer.shard(ranges, [(number + 1,) for number in range(first)])
    return optimizer


@pytest.mark.parametrize("kernel", ["fused", "written"])
def test_an_update_of_modernbert_base_is_few_launches(kernel: Any) -> None:
    seen, optimizer = Dispatched(), modernbert()
    with launched(lambda name: seen.kernels.update([name])), force_kernel(kernel, "update"):
        for count in (1, 2):  # the first update makes moments and tables
            seen.kernels.clear()
            set_update(optimizer, lr=1e-4, count=count)
            with seen:
                optimizer.step()
    assert (seen.count <= LAUNCHES) == (kernel == "fused"), seen.kernels
    assert seen.waits == [] or kernel == "written"
