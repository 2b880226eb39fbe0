"""Pieces of layers compiled for a GPU against the same pieces in Python, without a GPU.

On a CPU `test_pieces.py` compares code for CPUs, which was right when that for GPUs drew other dropout.
"""

import os
from collections.abc import Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from encoder_core import random_draws
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.dropout import dropout
from encoder_core.layers.pieces import Pieces
from encoder_core.layers.torch_internals import discard_graphs, mark_dynamic
from encoder_core.random_draws import uniform_int16
from encoder_core.trials.compile_trial import try_compilation
from encoder_core.trials.trial_network import TrialSubject
from tests.support.models.small_networks import NETWORKS

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime.errors import InterpreterError

from tests.support.models.gpu_code import CPU, gpu_code

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        os.environ["TRITON_INTERPRET"] != "1", reason="Triton compiles for this machine's GPU, which tries it"
    ),
    pytest.mark.filterwarnings("ignore:Could not find an active CPU backend:UserWarning"),
]

MODELS = {network.model: network.name for network in reversed(NETWORKS)}
_ROBERTA = next(network.model for network in NETWORKS if network.name == "roberta")
MODELS[_ROBERTA.model_copy(update={"activation": "gelu_tanh"})] = "roberta with gelu_tanh"
COLUMNS = [
    range(768),
    range(30),
    range(3, 17),
    range(1, 2),
    range(4094, 4099),
    range(5, 5),
    range(1 << 16, (1 << 16) + 9),
]
ENDS = (0, -1, 2**63 - 1, -(2**63))


@pytest.fixture(autouse=True)
def sources() -> Iterator[list[str]]:
    """Of kernels. No test leaves anything compiled. The checks of shapes, which only tests have, cannot be compiled."""
    discard_graphs()
    jaxtyping.config.update("jaxtyping_disable", True)
    with gpu_code() as found:
        yield found
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.compiler.set_stance("default")
    discard_graphs()


def random_keys(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=generator).tolist()


def test_products_in_32_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers on a GPU once had them: inductor takes `arange`'s numbers times a constant for an index, which
    has 32 bits, whatever their dtype.
    """

    def narrow(x: Tensor) -> Tensor:
        golden = random_draws._GOLDEN_RATIO_64
        return ((x * (golden >> 32)) << 32) + x * (golden & 0xFFFFFFFF)

    monkeypatch.setattr(random_draws, "_golden_multiples", narrow)
    with pytest.raises(InterpreterError, match="int32 overflow"):
        torch.compile(dropout)(torch.ones(2, 30), 0.1, torch.tensor(ENDS[:2]), torch.tensor(0))


@pytest.mark.long
def test_numbers_are_pythons() -> None:
    """For extreme keys and draws and some at random, more places than one, and columns from any place on."""

    def numbers(keys_T: Tensor, draw: Tensor) -> list[Tensor]:
        return [uniform_int16(keys_T, draw, columns) for columns in COLUMNS]

    compiled = torch.compile(numbers)
    for places, draw in ((5, ENDS[-1]), (3, *random_keys(1))):
        keys_T, drawn = torch.tensor([*ENDS, *random_keys(places)]), torch.tensor(draw)
        mark_dynamic(keys_T)
        pairs = zip(compiled(keys_T, drawn), numbers(keys_T, drawn), strict=True)
        assert all(torch.equal(found, expected.long()) for found, expected in pairs)


def test_dropout_and_its_gradient_are_pythons() -> None:
    width = 30
    generator = torch.Generator().manual_seed(width)
    draw = torch.tensor(-width)
    for places in (5, 3):
        x_TH, grad_TH = (torch.randn(places, width, generator=generator) for _ in range(2))
        keys_T = torch.tensor(random_keys(places))
        python, compiled = (
            _with_gradient(function, x_TH, grad_TH, keys_T, draw) for function in (dropout, torch.compile(dropout))
        )
        assert (python[0] == 0).any()
        assert torch.equal(compiled[0], python[0])
        assert torch.equal(compiled[1], python[1])


def _with_gradient(function: Any, x_TH: Tensor, grad_TH: Tensor, keys_T: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    x_TH = x_TH.clone().requires_grad_()
    mark_dynamic(x_TH)
    mark_dynamic(keys_T)
    y_TH = function(x_TH, 0.1, keys_T, draw)
    y_TH.backward(grad_TH)
    assert x_TH.grad is not None
    return y_TH.detach(), x_TH.grad


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=MODELS.get)
def test_every_familys_pieces_are_pythons(sources: list[str], model: ModelConfig, dtype: torch.dtype) -> None:
    """By the trial that a run makes on its GPU before it trains, on few tokens."""
    length = getattr(model, "reuse", 8)  # XLNet's rows are at least as long as what of them joins its memory
    tried = try_compilation(TrialSubject((model,), dtype, CPU, rows=2, length=length), Pieces())
    assert tried.is_right, tried
    assert any("tl.store" in source for source in sources)
