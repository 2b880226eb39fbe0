"""The losses of distillation against a plain statement of their formulas, on all logits at once."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.heads import distillation
from encoder_core.heads.distillation import LogitFactors, cosine_distances, linear_distillation
from encoder_core.layers import sizes
from tests.support.models.saved import Largest

seeds = st.integers(0, 2**31)


@dataclass(frozen=True)
class Case:
    tokens: int
    vocab: int
    widths: tuple[int, ...]  # the student's, then the teachers'
    temperature: float
    chunk: int
    seed: int

    def scores(self, dtype: torch.dtype = torch.float64) -> list[LogitFactors]:
        draws = torch.Generator().manual_seed(self.seed)
        return [
            LogitFactors(
                *(
                    torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
                    for shape in ((self.tokens, width), (self.vocab, width), (self.vocab,))
                )
            )
            for width in self.widths
        ]


cases = st.builds(
    Case,
    tokens=st.integers(0, 9),
    vocab=st.integers(2, 40),
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
    temperature=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    chunk=st.integers(1, 200),
    seed=seeds,
)


def tensors_of(scores: LogitFactors) -> list[Tensor]:
    return [tensor for tensor in scores if tensor is not None]


def stated(student: LogitFactors, teachers: list[LogitFactors], temperature: float) -> Tensor:
    """T^2 KL(mean of the teachers || student), summed over tokens, with every logit held at once."""
    p = torch.stack([F.softmax(F.linear(*teacher) / temperature, -1) for teacher in teachers]).mean(0).detach()
    log_q = F.log_softmax(F.linear(*student) / temperature, -1)
    return temperature**2 * (p * (p.log() - log_q)).sum()


@given(cases, st.floats(0.1, 3.0))
def test_equals_the_formula(case: Case, factor: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.CHUNK_LOGITS, "cpu", case.chunk)
        student, *teachers = case.scores()
        found = linear_distillation(student, teachers, case.temperature)
        expected = stated(student, teachers, case.temperature)
        torch.testing.assert_close(found.loss_sum, expected, rtol=1e-12, atol=1e-12)
        one = linear_distillation(student, teachers[:1], case.temperature)
        alike = F.linear(*student).argmax(-1) == F.linear(*teachers[0]).argmax(-1)
        assert one.agreeing == alike.sum()
        actual = torch.autograd.grad(found.loss_sum * factor, tensors_of(student))
        for grad, wanted in zip(actual, torch.autograd.grad(expected * factor, tensors_of(student)), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)


@given(cases)
def test_a_student_that_equals_its_teachers_has_no_loss_and_no_gradient(case: Case) -> None:
    student = case.scores()[0]
    found = linear_distillation(student, [student, student], case.temperature)
    assert abs(float(found.loss_sum.detach())) < 1e-12
    assert found.agreeing == case.tokens
    for grad in torch.autograd.grad(found.loss_sum, tensors_of(student)):
        assert grad.abs().max() < 1e-12 if grad.numel() else True


def test_no_gradient_reaches_a_teacher() -> None:
    student, teacher = Case(5, 11, (3, 4), 2.0, 2**24, 1).scores()
    linear_distillation(student, [teacher], 2.0).loss_sum.backward()
    assert all(tensor.grad is not None for tensor in tensors_of(student))
    assert all(tensor.grad is None for tensor in tensors_of(teacher))


def test_bf16_sums_in_fp32() -> None:
    case = Case(500, 40, (6, 6), 2.0, 2**24, 3)
    student, teacher = case.scores(torch.bfloat16)
    exact, exact_teacher = (
        [x.detach().double().requires_grad_() for x in tensors_of(scores)] for scores in (student, teacher)
    )
    found = linear_distillation(student, [teacher], 2.0)
    expected = stated(LogitFactors(*exact), [LogitFactors(*exact_teacher)], 2.0)
    assert found.loss_sum.dtype == torch.float32
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=5e-3)
    for grad, wanted in zip(
        torch.autograd.grad(found.loss_sum, tensors_of(student)),
        torch.autograd.grad(expected, exact),
        strict=True,
    ):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("chunk", [64, 256, 1024])
def test_no_operation_makes_more_logits_than_a_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of the student's and the teachers' logits alike: 32 times as many would be all."""
    monkeypatch.setitem(sizes.CHUNK_LOGITS, "cpu", chunk)
    student, *teachers = Case(chunk, 32, (2, 3, 2), 2.0, chunk, 2).scores()
    saved: list[int] = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x),
    ):
        linear_distillation(student, teachers, 2.0).loss_sum.backward()
    inputs = max(tensor.numel() for scores in (student, *teachers) for tensor in tensors_of(scores))
    assert largest.elements <= max(chunk // distillation.LIVE_LOGIT_ARRAYS, inputs)
    assert sum(saved) == sum(tensor.numel() for tensor in tensors_of(student))


def test_evaluation_computes_no_gradient() -> None:
    student, teacher = Case(5, 11, (3, 4), 2.0, 2**24, 1).scores()
    with torch.no_grad(), torch.profiler.profile() as profile:
        linear_distillation(student, [teacher], 2.0)
    called = {event.key for event in profile.key_averages()}
    assert "aten::addmm" in called
    assert not called & {"aten::mm", "aten::addmm_", "aten::sub_"}


@given(st.integers(0, 20), st.integers(1, 9), seeds)
def test_cosine_distances_equal_the_formula(tokens: int, hidden: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(tokens, hidden, generator=draws, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    expected = sum(
        (1 - s @ t / (s.norm() * t.norm()) for s, t in zip(student, teacher, strict=True)),
        start=0.0 * student.sum(),
    )
    found = cosine_distances(student, teacher)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, student)[0], rtol=1e-10, atol=1e-12)


def test_cosine_distances_of_half_precision_are_summed_in_fp32() -> None:
    student, teacher = torch.randn(2, 50, 8).bfloat16()
    found = cosine_distances(student, teacher)
    assert found.dtype == torch.float32
    wanted = cosine_distances(student.double(), teacher.double())
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
