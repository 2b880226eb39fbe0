"""The chunked cross-entropy against torch's own on all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.heads import cross_entropy
from encoder_core.heads.cross_entropy import linear_cross_entropy
from encoder_core.layers import sizes
from encoder_core.layers.kernel_choice import Kernel, force_kernel, record_requests


def inputs(targets: int, dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(targets, 6), (13, 6), (13,)]
    features, weight, bias = (torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes)
    return (features, weight, bias), torch.randint(13, (targets,), generator=generator)


@given(
    targets=st.integers(1, 11),
    chunk=st.sampled_from([1, 13 * 2, 13 * 4, 2**24]),
    multiple=st.sampled_from([1, 8, 64]),
    biased=st.booleans(),
    weighed=st.booleans(),
)
def test_equals_the_formula(targets: int, chunk: int, multiple: int, biased: bool, weighed: bool) -> None:
    """In chunks, with a vocabulary that is rounded up, and with a weight of each target."""
    (features, weight, offset), ids = inputs(targets)
    bias = offset if biased else None
    tensors = [x for x in (features, weight, bias) if x is not None]
    weights = torch.rand(targets, generator=torch.Generator().manual_seed(4)) * 9 if weighed else None
    logits = F.linear(features, weight, bias)
    losses = F.cross_entropy(logits, ids, reduction="none")
    expected = (losses if weights is None else losses * weights.double()).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.CHUNK_LOGITS, "cpu", chunk)
        patch.setitem(cross_entropy.VOCAB_MULTIPLES, "cpu", multiple)
        found = linear_cross_entropy(features, weight, bias, ids, weights=weights)
        actual = torch.autograd.grad(found.loss_sum * 0.37, tensors)
    torch.testing.assert_close(found.loss_sum, expected, rtol=1e-12, atol=0)
    assert found.correct == (logits.argmax(-1) == ids).sum()
    for grad, wanted in zip(actual, torch.autograd.grad(expected * 0.37, tensors), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-13)


def test_bf16_sums_in_fp32() -> None:
    tensors, ids = inputs(2000, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    loss_sum, *_ = linear_cross_entropy(*tensors, ids)
    expected = F.cross_entropy(F.linear(exact[0], exact[1], exact[2]), ids, reduction="sum")
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() == pytest.approx(expected.item(), rel=2e-3)
    for grad, wanted in zip(torch.autograd.grad(loss_sum, tensors), torch.autograd.grad(expected, exact), strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - wanted).norm() / wanted.norm() < 0.02


def test_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sizes.CHUNK_LOGITS, "cpu", 13 * 2)
    tensors, ids = inputs(50)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(*tensors, ids)
    assert sum(saved) == sum(tensor.numel() for tensor in tensors)


def test_evaluation_computes_no_gradient() -> None:
    tensors, ids = inputs(5)
    with torch.no_grad(), torch.profiler.profile() as profile:
        linear_cross_entropy(*tensors, ids)
    called = {event.key for event in profile.key_averages()}
    assert "aten::addmm" in called
    assert not called & {"aten::mm", "aten::addmm_", "aten::index_put_"}


@pytest.mark.heavy
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("group", [4, 13, 256])
def test_samples_follow_the_tempered_softmax(temperature: float, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "SAMPLING_GROUP_SIZE", group)
    draws = 40_000
    tensors, _ = inputs(1)
    features, weight, bias = (x.detach() for x in tensors)
    ids = torch.zeros(draws, dtype=torch.int64)
    torch.manual_seed(0)
    sums = linear_cross_entropy(
        features.expand(draws, -1), weight, bias, ids, temperature=temperature, keys=torch.arange(draws)
    )
    logits = F.linear(features, weight, bias)
    expected = draws * (logits[0] / temperature).softmax(-1)
    assert sums.sampled is not None
    observed = torch.bincount(sums.sampled, minlength=13).double()
    assert len(observed) == 13
    chi_square = ((observed - expected).square() / expected).sum().item()
    assert chi_square < 40  # 12 degrees of freedom: exceeded once in 10,000
    torch.testing.assert_close(sums.loss_sum / draws, F.cross_entropy(logits, ids[:1]))


def test_sampling_repeats_with_the_seed_however_it_is_chunked_and_rounded_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, ids = inputs(11)
    outcomes: list[Tensor] = []
    for chunk, multiple, seed in ((2**24, 1, 5), (13 * 2, 64, 5), (2**24, 1, 6)):
        monkeypatch.setitem(sizes.CHUNK_LOGITS, "cpu", chunk)
        monkeypatch.setitem(cross_entropy.VOCAB_MULTIPLES, "cpu", multiple)
        torch.manual_seed(seed)
        sampled = linear_cross_entropy(*tensors, ids, temperature=0.7, keys=torch.arange(11)).sampled
        assert sampled is not None
        outcomes.append(sampled)
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab", [60, 700])
def test_ids_drawn_from_logits_that_are_not_finite_are_ids(bad: float, vocab: int) -> None:
    features = torch.randn(20, 4)
    features[::2] = bad
    ids = torch.randint(vocab, (20,))
    sampled = linear_cross_entropy(
        features, torch.randn(vocab, 4), torch.zeros(vocab), ids, temperature=1.0, keys=torch.arange(20)
    ).sampled
    assert sampled is not None
    assert int(sampled.min()) >= 0
    assert int(sampled.max()) < vocab


def test_chunks_are_larger_on_gpus_and_cover_all_rows_once() -> None:
    for kind, most in sizes.CHUNK_LOGITS.items():
        for rows, vocab in ((0, 7), (5000, 50_265), (3, 2**28), (40_000, 128_100)):
            found = list(cross_entropy.logit_chunks(rows, vocab, torch.device(kind)))
            assert [row for chunk in found for row in range(rows)[chunk]] == list(range(rows))
            assert all((chunk.stop - chunk.start) * vocab <= max(most, vocab) for chunk in found)
            assert len(found) <= 1 + rows // max(1, most // vocab)
    assert sizes.CHUNK_LOGITS["cuda"] == 8 * sizes.CHUNK_LOGITS["cpu"]


@pytest.mark.parametrize(("vocab", "chunk", "biased"), [(100, 2 * 128, True), (64, 2**24, False)])
def test_the_kernel_gives_what_the_formula_gives(
    vocab: int, chunk: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, accuracy, drawn ids and gradients, interpreted; as on a GPU, with a vocabulary that is rounded up."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setitem(sizes.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setitem(cross_entropy.VOCAB_MULTIPLES, "cpu", 64)
    monkeypatch.setattr(cross_entropy, "_supports", lambda features: True)
    draws = torch.Generator().manual_seed(vocab)
    shapes = [(3, 6), (vocab, 6), (vocab,)][: 3 if biased else 2]
    tensors = [torch.randn(s, generator=draws, dtype=torch.float64, requires_grad=True) for s in shapes]
    ids = torch.randint(vocab, (3,), generator=draws)

    def outcome(kernel: Kernel, temperature: float | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with record_requests() as places, force_kernel(kernel, "loss"):
            found = linear_cross_entropy(
                tensors[0], tensors[1], tensors[2] if biased else None, ids,
                temperature=temperature, keys=torch.arange(3),
            )  # fmt: skip
        assert places == {("loss", False): {"fused": None, "written": None}}
        sampled = ids if found.sampled is None else found.sampled
        return [found.loss_sum, found.correct, sampled, *torch.autograd.grad(0.37 * found.loss_sum, tensors)]

    for temperature in (None, 0.7):
        for one, other in zip(outcome("fused", temperature), outcome("written", temperature), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_the_kernel_reads_logits_of_an_evaluation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax_loss = pytest.importorskip("encoder_core.kernels.softmax_loss", reason="Triton is not installed")
    monkeypatch.setattr(cross_entropy, "_supports", lambda features: True)
    monkeypatch.setattr(softmax_loss, "overwrite_with_gradient", lambda *given, **how: pytest.fail("a gradient"))
    tensors, ids = inputs(5)
    with torch.no_grad(), force_kernel("fused", "loss"):
        found = linear_cross_entropy(*tensors, ids)
    torch.testing.assert_close(found.loss_sum, linear_cross_entropy(*tensors, ids).loss_sum)
