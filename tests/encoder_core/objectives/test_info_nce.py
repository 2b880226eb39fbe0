"""InfoNCE by hand: its loss and gradient are autograd's, whoever computes which part, in chunks of any size."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.objectives.modules import info_nce as module
from encoder_core.objectives.modules.info_nce import info_nce
from encoder_core.objectives.modules.losses import AllExamples


class Known(AllExamples):
    """One of several processes; what the others have is known ahead, gathered in this order."""

    def __init__(self, at: Tensor, gathered: list[Tensor]) -> None:
        self.at, self._gathered = at, list(gathered)

    def gather(self, own: Tensor) -> Tensor:
        every = self._gathered.pop(0)
        torch.testing.assert_close(own, every[self.at])
        return every


def is_counted(i: int, c: str, j: int, examples: list[list[str]], place: int) -> bool:
    """Whether the text `c` at `place` of example j is in the denominator of example i's query."""
    query, positive = examples[i][:2]
    if (i, 1) == (j, place):
        return True
    asked_the_same = place == 1 and examples[j][0] == query
    return c not in (query, positive) and not asked_the_same


def by_autograd(
    vectors: Tensor, examples: list[list[str]], temperature: float, bidirectional: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The formula: losses [N], the gradient of their sum, and the logarithms of the denominators in either direction.
    A row of `examples` is a query, its positive, and hard negatives."""
    vectors, n = vectors.clone().requires_grad_(), len(examples)
    there, back, losses = [], [], []
    for i in range(n):
        query, positive = vectors[i, 0], vectors[i, 1]
        candidates = [
            vectors[j, place] @ query / temperature
            for j in range(n)
            for place in range(1, len(examples[j]))
            if is_counted(i, examples[j][place], j, examples, place)
        ]
        queries = [
            vectors[j, 0] @ positive / temperature for j in range(n) if is_counted(j, examples[i][1], i, examples, 1)
        ]
        there.append(torch.stack(candidates).logsumexp(0))
        back.append(torch.stack(queries).logsumexp(0))
        ways = [there[i], back[i]] if bidirectional else [there[i]]
        losses.append(sum(ways) / len(ways) - query @ positive / temperature)
    loss_N = torch.stack(losses)
    (gradient,) = torch.autograd.grad(loss_N.sum(), vectors)
    return loss_N.detach(), gradient, [torch.stack(there).detach(), torch.stack(back).detach()]


def numbered(examples: list[list[str]]) -> Tensor:
    texts = sorted({text for example in examples for text in example})
    return torch.tensor([[texts.index(text) for text in example] for example in examples])


@pytest.mark.long
@given(
    examples=st.integers(1, 9),
    texts=st.integers(2, 4),
    width=st.integers(1, 5),
    temperature=st.floats(0.05, 5),
    bidirectional=st.booleans(),
    chunk=st.integers(1, 40),
    different=st.integers(1, 40),
    draws=st.randoms(use_true_random=False),
)
def test_any_part_of_any_batch(
    examples: int,
    texts: int,
    width: int,
    temperature: float,
    bidirectional: bool,
    chunk: int,
    different: int,
    draws: random.Random,
) -> None:
    numbers = [draws.uniform(-1, 1) for _ in range(examples * texts * width)]
    every = torch.tensor(numbers, dtype=torch.float64).view(examples, texts, width)
    drawn = [[str(draws.randrange(different)) for _ in range(texts)] for _ in range(examples)]
    losses, gradient, gathered = by_autograd(every, drawn, temperature, bidirectional)
    at = torch.tensor(draws.sample(range(examples), draws.randint(0, examples)), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_SIMILARITIES", chunk)
        found = info_nce(
            every[at],
            every,
            Known(at, gathered),
            texts_NG=numbered(drawn),
            temperature=temperature,
            bidirectional=bidirectional,
        )
    torch.testing.assert_close(found.loss, losses[at], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.gradient, gradient[at], rtol=1e-10, atol=1e-10)


def test_what_it_says_about_vectors() -> None:
    """The first query is nearest to its positive, the second to the first's; their candidates' similarities."""
    vectors = torch.tensor([[[1.0, 0], [1, 0]], [[0.8, 0.6], [0, 1]]])
    texts = [["a", "b"], ["c", "d"]]
    known = Known(torch.arange(2), by_autograd(vectors, texts, 1.0, False)[2])
    found = info_nce(vectors, vectors, known, texts_NG=numbered(texts), temperature=1.0)
    assert found.correct.tolist() == [True, False]
    torch.testing.assert_close(found.positive, torch.tensor([1.0, 0.6]))
    torch.testing.assert_close(found.negative, torch.tensor([0.0, 0.8]))


def test_an_equal_positive_is_neither_negative_nor_mistake() -> None:
    vectors = torch.tensor([[[1.0, 0], [0.6, 0.8]], [[0.8, 0.6], [1, 0]]])
    texts = [["a", "b"], ["c", "b"]]
    known = Known(torch.arange(2), by_autograd(vectors, texts, 1.0, False)[2])
    found = info_nce(vectors, vectors, known, texts_NG=numbered(texts), temperature=1.0)
    assert found.loss.tolist() == [0, 0]
    assert found.correct.tolist() == [True, True]
    assert found.negative.tolist() == [0, 0]
    assert found.gradient.abs().max() == 0


def test_similarities_beyond_what_fp32_can_exponentiate() -> None:
    vectors, texts = torch.tensor([[[30.0], [30.0]], [[-30.0], [-30.0]]]), [["a", "b"], ["c", "d"]]
    known = Known(torch.arange(2), by_autograd(vectors, texts, 0.01, True)[2])
    found = info_nce(vectors, vectors, known, texts_NG=numbered(texts), temperature=0.01, bidirectional=True)
    assert found.loss.tolist() == [0, 0]
    assert found.gradient.abs().max() == 0
