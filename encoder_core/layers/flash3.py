"""FlashAttention-3 (Shah et al., 2024): on Hopper GPUs, without dropout, where its package is installed.

torch puts it in the place of its own flash attention, for a whole process and until that is taken back. So both are
called by one operator, and `activate` says before a forward pass which of them it is; the backward pass must follow
before the other is activated. It is one more kernel that a trial may prefer, never the usual one. It has not met a GPU.
"""

from importlib.util import find_spec

import torch

PACKAGE = "flash_attn_interface"
_HOPPER = 9  # compute capability
_INSTALLED = find_spec(PACKAGE) is not None


def flash_takes(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether the varlen flash kernel takes these: CUDA, half precision, head width 8, 16, ..., 256."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def flash3_takes(device: torch.device, dtype: torch.dtype, width: int, dropout: float) -> bool:
    """Whether it takes tensors that torch's own flash attention takes."""
    if not _INSTALLED or device.type != "cuda" or dropout > 0.0:
        return False
    half = dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device)[0] == _HOPPER


def activate(wanted: bool) -> None:
    """From here on torch's flash attention is version 3, or its own again. Nothing is done where there is no package.

    Raises ImportError, RuntimeError: the package does not work here.
    """
    if not _INSTALLED:
        return
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    if wanted and current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")
    elif not wanted and current_flash_attention_impl() == "FA3":
        restore_flash_attention_impl()
