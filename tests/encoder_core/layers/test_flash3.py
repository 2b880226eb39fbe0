"""FlashAttention-3 on machines that have none of it: when it is offered, how torch is told, and what is refused."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention as torch_attention

from encoder_core.layers import attention
from encoder_core.layers import gpu_attention as flash3
from encoder_core.layers.kernel_choice import Preference, set_preference
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
    """A package is there, on a Hopper GPU; what torch does with it."""
    found: list[str] = []

    def register() -> Handle:
        found.append("activated")
        return Handle(found)

    monkeypatch.setattr(flash3, "_HAS_FLASH3", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    yield found
    flash3.switch_flash3(False)


def test_it_is_offered_on_hopper_without_dropout_only(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash3.flash3_supports(CUDA, torch.bfloat16, 64, 0.0)
    assert not flash3.flash3_supports(CUDA, torch.bfloat16, 64, 0.1)
    assert not flash3.flash3_supports(CUDA, torch.float32, 64, 0.0)
    assert not flash3.flash3_supports(CUDA, torch.float16, 65, 0.0)
    assert not flash3.flash3_supports(torch.device("cpu"), torch.bfloat16, 64, 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not flash3.flash3_supports(CUDA, torch.bfloat16, 64, 0.0)


def test_without_its_package_it_is_never_offered_and_torch_is_left_alone(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash3, "_HAS_FLASH3", False)
    assert not flash3.flash3_supports(CUDA, torch.bfloat16, 64, 0.0)
    flash3.switch_flash3(True)
    assert calls == []


def test_torch_is_told_once_and_has_its_own_again_for_every_other_kernel(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `attend_with_best_kernel`, on a CPU whose kernels are said to be the flash ones."""
    rows = Rows(torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 1, 2, 0, 1, 2, 3]), 4)
    q = torch.randn(7, 2, 8)
    monkeypatch.setattr(attention, "_possible_kernels", lambda *given: ["padded", "flash3"])
    monkeypatch.setattr(attention, "varlen_flash", lambda *given: given[0])
    try:
        for order in (("flash3",), ("flash3",), ("padded",), ("flash3", "padded")):
            set_preference(Preference(order, order))
            attention.attend_with_best_kernel(q, q, q, rows, 0.0)
    finally:
        set_preference(None)
    assert calls == ["activated", "restored", "activated"]


def test_a_package_that_does_not_work_raises_where_a_trial_sees_it(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Handle:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(torch_attention._registry._FLASH_ATTENTION_IMPLS, "FA3", broken)
    with pytest.raises(ImportError, match="libcudart"):
        flash3.switch_flash3(True)
    assert torch_attention.current_flash_attention_impl() is None
