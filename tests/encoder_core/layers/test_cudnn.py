"""cuDNN's attention where there is none of it: when it is offered, how torch is told, and what a trial says of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from encoder_core.families.bert import BertConfig
from encoder_core.layers import attention
from encoder_core.layers.gpu_attention import cudnn_supports
from encoder_core.layers.kernel_choice import force_kernel
from encoder_core.layers.rows import Rows
from encoder_core.trials.kernel_attempts import serve
from encoder_core.trials.kernel_trial import TrialUnit, TriedKernel, build_preference
from encoder_core.trials.trial_network import TrialSubject, torch_settings
from tests.support.models.plain_attention import reference


class OnCuda(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")


def rows_of(*lengths: int, causal: bool = False) -> Rows:
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return Rows(edges, torch.cat([torch.arange(n) for n in lengths]), max(lengths), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_offered_for_full_rows_without_dropout_where_torch_takes_them(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    asked: list[Any] = []

    def takes(given: Any) -> bool:
        asked.append((tuple(given.query.shape), given.is_causal, given.dropout, given.attn_mask))
        return len(asked) == 1

    monkeypatch.setattr(cuda, "can_use_cudnn_attention", takes)
    q, full = torch.randn(12, 2, 8), rows_of(4, 4, 4, causal=causal)
    here = q.as_subclass(OnCuda)
    assert cudnn_supports(here, full)
    assert asked == [((3, 2, 4, 8), causal, 0.0, None)]
    assert not cudnn_supports(here, full), "torch says no, as in its deterministic mode"
    for given in ((q, full), (here, rows_of(5, 7, causal=causal))):
        assert not cudnn_supports(*given)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("dropout", "window", "offered"), [(0.0, None, True), (0.0, 3, True), (0.1, None, False), (0.0, 2, False)]
)
def test_it_is_offered_only_where_it_needs_no_mask(
    monkeypatch: pytest.MonkeyPatch, dropout: float, window: int | None, offered: bool
) -> None:
    """With a mask its backward pass may return NaN (pytorch#196678). A window of 3 hides nothing of rows of 4."""
    monkeypatch.setattr(cuda, "can_use_cudnn_attention", lambda given: True)
    q = torch.randn(12, 2, 8).bfloat16().as_subclass(OnCuda)
    kernels = attention._possible_kernels(q, rows_of(4, 4, 4), dropout, window, None)
    assert ("cudnn" in kernels) == offered


class SaysCuda(Tensor):
    """A CPU's tensor that torch's attention gets as a GPU's."""

    is_cuda = True


@pytest.mark.parametrize("lengths", [(4, 4), (3, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_other_kernel_may_become_cudnns(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], causal: bool
) -> None:
    """On Hopper GPUs it is the default of torch's `scaled_dot_product_attention`, also for masks."""
    seen, compute = list[bool](), F.scaled_dot_product_attention

    def sdpa(*given: Any, **options: Any) -> Tensor:
        seen.append(cuda.cudnn_sdp_enabled())
        return compute(*(x.as_subclass(Tensor) for x in given), **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    rows, (q, k, v) = rows_of(*lengths, causal=causal), torch.randn(3, sum(lengths), 2, 8).unbind()
    found = attention.padded_sdpa(q.as_subclass(SaysCuda), k.as_subclass(SaysCuda), v.as_subclass(SaysCuda), rows, 0.0)
    torch.testing.assert_close(found.as_subclass(Tensor), reference(q, k, v, rows, 0.0))
    assert seen == [False]
    assert cuda.cudnn_sdp_enabled()


def possible(q: Tensor, rows: Rows, dropout: float, window: int | None, others: None) -> list[str]:
    """A CPU that has cuDNN's attention."""
    return ["blocked", *(["cudnn"] if rows.is_full and not dropout else []), "padded", "written"]


@pytest.mark.parametrize("causal", [False, True])
def test_torch_may_use_nothing_else_for_full_rows_and_others_take_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    seen, compute = list[tuple[bool, bool]](), F.scaled_dot_product_attention

    def sdpa(*given: Any, **options: Any) -> Tensor:
        seen.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled() or cuda.math_sdp_enabled()))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return compute(*given, **options)

    monkeypatch.setattr(attention, "_possible_kernels", possible)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    q, k, v = torch.randn(3, 12, 2, 8).unbind()
    for rows, expected in (
        (rows_of(4, 4, 4, causal=causal), [(True, False)]),
        (rows_of(5, 7, causal=causal), []),
    ):
        with force_kernel("cudnn"):
            found = attention.attend_with_best_kernel(q, k, v, rows, 0.0)
        torch.testing.assert_close(found, reference(q, k, v, rows, 0.0))
        assert seen == expected
        seen.clear()
    assert cuda.flash_sdp_enabled()
    assert cuda.math_sdp_enabled()


def _fails(context: Tensor) -> Tensor:
    raise RuntimeError("No available kernel. Aborting execution.")


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda context: context,
    "wrong": lambda context: 1.003 * context,
    "failing": _fails,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_trial_uses_it_only_if_it_is_right(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On the trial's full rows; its others are computed by the formula meanwhile."""
    full = list[bool]()

    def cudnn(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        full.append(rows.is_full)
        return FAULTS[kind](attention.written_formula(q, k, v, rows, 0.0))

    monkeypatch.setattr(attention, "_possible_kernels", possible)
    monkeypatch.setattr(attention, "cudnn_attention", cudnn)
    shape: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "max_length": 48}
    network = BertConfig(**shape, dropout=0.0, attention_dropout=0.0)
    subject = TrialSubject((network,), torch.float32, torch.device("cpu"), rows=2, length=24)
    reports = list[dict[str, Any]]()

    class Line:
        def report(self, **what: Any) -> None:
            reports.append(what)

    request = {
        "subject": subject.to_json(),
        "settings": torch_settings(),
        "timed": False,
        "done": [],
        "skipped": [],
    }
    serve(request, Line())
    found = {TrialUnit(*one["unit"]).kernel: TriedKernel(**one["found"]) for one in reports if "found" in one}
    assert found["cudnn"].is_right == (kind == "right")
    assert all(one.is_right for kernel, one in found.items() if kernel != "cudnn")
    assert full
    assert all(full)
    assert ("cudnn" in build_preference(list(found.values())).plain) == (kind == "right")
