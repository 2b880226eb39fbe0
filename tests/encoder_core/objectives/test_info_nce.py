"""InfoNCE by hand: its loss and gradient are autograd's, whoever computes which part, in chunks of any size."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.objectives import info_nce as module
from encoder_core.objectives.info_nce import info_nce
from encoder_core.objectives.losses import AllExamples


class Known(AllExamples):
    """One of several processes; what the others have is known ahead, gathered in this order."""

    def __init__(self, at: Tensor, gathered: list[Tensor]) -> None:
        self.at, self._gathered = at, list(gathered)

    def gather(self, own: Tensor) -> Tensor:
        every = self._gathered.pop(0)
        torch.testing.assert_close(own, every[self.at])
        return every


def by_autograd(
    texts: Tensor, temperature: float, bidirectional: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses [N], the gradient of their sum, and the logarithms of the denominators in either direction."""
    texts = texts.clone().requires_grad_()
    queries, candidates, own = texts[:, 0], texts[:, 1:].flatten(0, 1), torch.arange(len(texts))
    there = queries @ candidates.T / temperature
    back = texts[:, 1] @ queries.T / temperature
    losses = F.cross_entropy(there, own * (texts.shape[1] - 1), reduction="none")
    if bidirectional:
        losses = (losses + F.cross_entropy(back, own, reduction="none")) / 2
    (gradient,) = torch.autograd.grad(losses.sum(), texts)
    return losses.detach(), gradient, [there.logsumexp(1).detach(), back.logsumexp(1).detach()]


@given(
    examples=st.integers(1, 9),
    texts=st.integers(2, 4),
    width=st.integers(1, 5),
    temperature=st.floats(0.05, 5),
    bidirectional=st.booleans(),
    chunk=st.integers(1, 40),
    draws=st.randoms(use_true_random=False),
)
def test_any_part_of_any_batch(
    examples: int,
    texts: int,
    width: int,
    temperature: float,
    bidirectional: bool,
    chunk: int,
    draws: random.Random,
) -> None:
    numbers = [draws.uniform(-1, 1) for _ in range(examples * texts * width)]
    every = torch.tensor(numbers, dtype=torch.float64).view(examples, texts, width)
    losses, gradient, gathered = by_autograd(every, temperature, bidirectional)
    at = torch.tensor(draws.sample(range(examples), draws.randint(0, examples)), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        found = info_nce(
            every[at], every, Known(at, gathered), temperature=temperature, bidirectional=bidirectional
        )
    torch.testing.assert_close(found.loss, losses[at], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.gradient, gradient[at], rtol=1e-10, atol=1e-10)


def test_what_it_says_about_vectors() -> None:
    """The first query is nearest to its positive, the second to the first's; their candidates' similarities."""
    texts = torch.tensor([[[1.0, 0], [1, 0]], [[0.8, 0.6], [0, 1]]])
    found = info_nce(texts, texts, Known(torch.arange(2), by_autograd(texts, 1.0, False)[2]), temperature=1.0)
    assert found.correct.tolist() == [True, False]
    torch.testing.assert_close(found.positive, torch.tensor([1.0, 0.6]))
    torch.testing.assert_close(found.negative, torch.tensor([0.0, 0.8]))


def test_similarities_beyond_what_fp32_can_exponentiate() -> None:
    texts = torch.tensor([[[30.0], [30.0]], [[-30.0], [-30.0]]])
    gathered = by_autograd(texts, 0.01, True)[2]
    found = info_nce(texts, texts, Known(torch.arange(2), gathered), temperature=0.01, bidirectional=True)
    assert found.loss.tolist() == [0, 0]
    assert found.gradient.abs().max() == 0
