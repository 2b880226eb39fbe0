"""FlashAttention-3 and -4 on machines that have neither: when they are offered, how torch is told, what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import attention as torch_attention

from encoder_core.layers import attention, gpu_attention
from encoder_core.layers.gpu_attention import FlashRelease, newer_flash_kernels, newer_flash_versions, switch_flash
from encoder_core.layers.kernel_choice import Kernel, Preference, set_preference
from encoder_core.layers.rows import Rows

CUDA = torch.device("cuda")


class Handle:
    """What torch removes to have its own kernels again."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def remove(self) -> None:
        self._calls.append("restored")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Both packages are there, on a Hopper GPU; what torch does with them."""
    found: list[str] = []

    def register(name: str) -> Handle:
        found.append(name)
        return Handle(found)

    monkeypatch.setattr(gpu_attention, "_installed", gpu_attention._RELEASES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, name, lambda name=name: register(name))
    yield found
    switch_flash("flash")


@pytest.mark.parametrize(
    ("generation", "width", "expected"),
    [
        (8, 64, []),
        (9, 64, ["flash3", "flash4"]),
        (9, 192, ["flash3"]),
        (9, 65, []),
        (10, 128, ["flash4"]),
        (10, 192, []),
        (12, 64, []),
    ],
)
def test_they_are_offered_on_gpus_and_for_heads_that_they_support(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, generation: int, width: int, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    assert newer_flash_kernels(CUDA, torch.bfloat16, width) == expected
    assert newer_flash_kernels(CUDA, torch.float16, width) == expected
    assert newer_flash_kernels(CUDA, torch.float32, width) == []
    assert newer_flash_kernels(torch.device("cpu"), torch.bfloat16, width) == []


def test_without_a_package_none_is_offered_and_torch_is_left_alone(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "_installed", {})
    assert newer_flash_kernels(CUDA, torch.bfloat16, 64) == []
    switch_flash("flash4")
    assert calls == []


def test_a_release_inside_an_older_ones_package_is_found_without_importing_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    release = FlashRelease("FA4", "older_flash_release/cute", "older-flash", (9,), 128)
    assert not release.is_installed()
    (tmp_path / "older_flash_release").mkdir()
    (tmp_path / "older_flash_release/__init__.py").write_text("raise ImportError('undefined symbol')")
    assert not release.is_installed()
    (tmp_path / "older_flash_release/cute").mkdir()
    assert release.is_installed()
    assert "older_flash_release" not in sys.modules


def test_torch_is_told_once_and_has_its_own_again_for_every_other_kernel(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `attend_with_best_kernel`, on a CPU whose kernels are said to be the flash ones."""
    rows = Rows(torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 1, 2, 0, 1, 2, 3]), 4)
    q = torch.randn(7, 2, 8)
    monkeypatch.setattr(attention, "_possible_kernels", lambda *given: ["padded", "flash3", "flash4"])
    monkeypatch.setattr(attention, "varlen_flash", lambda *given: given[0])
    orders: tuple[tuple[Kernel, ...], ...] = (
        ("flash3",),
        ("flash3",),
        ("padded",),
        ("flash4", "padded"),
        ("flash4",),
        ("flash3",),
    )
    try:
        for order in orders:
            set_preference(Preference(order, order))
            attention.attend_with_best_kernel(q, q, q, rows, 0.0)
    finally:
        set_preference(None)
    assert calls == ["FA3", "restored", "FA4", "restored", "FA3"]


@pytest.mark.parametrize(("kernel", "name"), [("flash3", "FA3"), ("flash4", "FA4")])
def test_a_package_that_does_not_work_raises_where_a_trial_sees_it(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, kernel: Kernel, name: str
) -> None:
    def broken() -> Handle:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, name, broken)
    with pytest.raises(ImportError, match="libcudart"):
        switch_flash(kernel)
    assert torch_attention.current_flash_attention_impl() is None


def test_versions_are_those_that_pip_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_attention, "_installed", gpu_attention._RELEASES)
    record = tmp_path / "flash_attn_4-4.0.0b36.dist-info/METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    assert newer_flash_versions() == {"flash3": "", "flash4": "4.0.0b36"}
    monkeypatch.setattr(gpu_attention, "_installed", {})
    assert newer_flash_versions() == {}
