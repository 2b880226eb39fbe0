"""A CPU that plays a GPU nobody has met, one of whose kernels is wrong, breaks down, or ends the process."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from encoder_core.layers import attention

GPU = "a CPU that plays a GPU"


@contextmanager
def bad_kernel(how: str | None) -> Iterator[None]:
    """`how`: right, wrong, broken or deadly; None: a CPU as it is."""
    right = attention.blocked

    def blocked(*given: Any) -> Tensor:
        if how == "broken":
            raise RuntimeError("no kernel image is available")
        if how == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return right(*given) * (1.01 if how == "wrong" else 1.0)

    with ExitStack() as stack:
        if how is not None:
            stack.enter_context(patch("launcher.rank.kernels.gpu_here", lambda: GPU))
            stack.enter_context(patch.object(attention, "blocked", blocked))
        yield
