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
    assert cudnn_supports(here, full, 0.0)
    assert asked == [((3, 2, 4, 8), causal, 0.0, None)]
    assert not cudnn_supports(here, full, 0.0), "torch says no, as in its deterministic mode"
    for given in ((q, full, 0.0), (here, full, 0.1), (here, rows_of(5, 7, causal=causal), 0.0)):
        assert not cudnn_supports(*given)
    assert len(asked) == 2


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

    def sdpa(q: Tensor, k: Tensor, v: Tensor, rows: Rows, *given: Any) -> Tensor:
        context = attention.written_formula(q, k, v, rows, *given)
        if cuda.math_sdp_enabled():  # the kernel `padded`
            return context
        full.append(rows.is_full)
        return FAULTS[kind](context)

    monkeypatch.setattr(attention, "_possible_kernels", possible)
    monkeypatch.setattr(attention, "padded_sdpa", sdpa)
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
