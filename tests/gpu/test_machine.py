"""Driver, torch and GPU go together, and reach what the vendor says, within reason."""

import pytest
import torch

from tests.gpu.machine import DEVICE, GPU, Figure, known_gpu, seconds_of

_PEAK = 0.5  # share of the vendor's figure: a GPU below it is throttled, shared, or not what its name says
_BANDWIDTH = 0.6
_SIZES = (4096, 8192) if GPU else (256, 512)
_COPIED_BYTES = (2 << 30) if GPU else (64 << 20)


def test_a_sum_on_the_device_is_right() -> None:
    assert float(torch.arange(1000.0, device=DEVICE).sum()) == 499500.0


@pytest.mark.skipif(not GPU, reason="a GPU's driver is asked")
def test_torch_was_built_for_this_gpu(figure: Figure) -> None:
    """Compiled code runs on GPUs of its own generation with the same or a later minor revision, PTX on any later."""
    major, minor = torch.cuda.get_device_capability(0)
    figure("free memory", torch.cuda.mem_get_info(0)[0] / 2**30, "GiB")
    assert torch.cuda.is_bf16_supported()
    found = [arch.partition("_") for arch in torch.cuda.get_arch_list()]
    numbers = [(kind, int("".join(filter(str.isdigit, digits)))) for kind, _, digits in found]
    assert any(
        (kind == "sm" and number // 10 == major and number % 10 <= minor)
        or (kind == "compute" and number <= 10 * major + minor)
        for kind, number in numbers
    ), torch.cuda.get_arch_list()


def _square(dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of a product of square matrices."""
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "tf32"])
def test_matrix_products_reach_their_peak(name: str, figure: Figure) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        flops = max(_square(dtype, size) for size in _SIZES)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    figure(f"matrix products in {name}", flops / 1e12, "TFLOP/s")
    known = known_gpu()
    if known is not None and name != "tf32":
        assert flops >= _PEAK * (known.peak_fp32 if name == "fp32" else known.peak)


def test_memory_reaches_its_bandwidth(figure: Figure) -> None:
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    rate = 2.0 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source))
    figure("bandwidth of memory", rate / 1e9, "GB/s")
    known = known_gpu()
    if known is not None:
        assert rate >= _BANDWIDTH * known.bandwidth
