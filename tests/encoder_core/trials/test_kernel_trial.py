"""Trials of kernels: what is right, and which one is preferred."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.heads import cross_entropy
from encoder_core.layers import attention, deberta_attention
from encoder_core.layers.kernel_choice import Kernel, Place, Preference, pick, set_preference
from encoder_core.optim import adamw
from encoder_core.trials.kernel_attempts import serve
from encoder_core.trials.kernel_trial import TrialUnit, TriedKernel, build_preference, merge_networks
from encoder_core.trials.trial_network import TrialSubject, torch_settings

SHAPE: dict[str, Any] = {"layers": 3, "hidden": 16, "heads": 2, "feed_forward": 32, "max_length": 48}
NETWORKS: dict[str, ModelConfig] = {
    "plain": BertConfig(**SHAPE),
    "windows": ModernBertConfig(**SHAPE),
    "disentangled": DebertaV2Config(**SHAPE),
    "permuted": XlnetConfig(**SHAPE, reuse=16, memory=16),
}


class Reports(list[dict[str, Any]]):
    def report(self, **what: Any) -> None:
        self.append(what)

    @property
    def found(self) -> list[TriedKernel]:
        return merge_networks({TrialUnit(*one["unit"]): TriedKernel(**one["found"]) for one in self if "found" in one})


def tried_with(network: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[tuple[Kernel, bool], TriedKernel]:
    """At attention, by kernel."""
    found = reported(network, dtype).found
    return {(one.kernel, one.dropped): one for one in found if one.place == "attention"}


def reported(network: ModelConfig, dtype: torch.dtype = torch.float32, *, stable: bool = False) -> Reports:
    """In this process, whose kernels a test may replace."""
    subject = TrialSubject((network,), dtype, torch.device("cpu"), rows=2, length=24, stable=stable)
    reports = Reports()
    request = {
        "subject": subject.to_json(),
        "settings": torch_settings(),
        "timed": False,
        "done": [],
        "skipped": [],
    }
    serve(request, reports)
    return reports


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_all_kernels_of_a_cpu_are_right_and_draw_the_same(name: str, dtype: torch.dtype) -> None:
    found = tried_with(NETWORKS[name], dtype)
    assert {kernel for kernel, _ in found} >= {"padded", "written"}
    assert all(one.is_right and one.error is not None for one in found.values()), found


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a scale": lambda context: 1.003 * context,
    "no gradient": torch.detach,
    "a token": lambda context: torch.cat([context[:-1], 0 * context[-1:]]),
    "nan": lambda context: context / 0.0,
}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["plain", "disentangled"])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: str) -> None:
    module = deberta_attention if name == "disentangled" else attention
    right = module.attend_blocked
    monkeypatch.setattr(module, "attend_blocked", lambda *given: WRONG[wrong](right(*given)))
    found = tried_with(NETWORKS[name])
    assert {kernel for (kernel, _), one in found.items() if not one.is_right} == {"blocked"}
    order = build_preference(list(found.values()))
    assert "blocked" not in order.plain + order.dropped


def one(kernel: Kernel, seconds: float | None = None, **others: Any) -> TriedKernel:
    given = {"dropped": False, "error": 1e-7, "bound": 1e-6} | others
    return TriedKernel(kernel=kernel, seconds=seconds, **given)


def test_a_clearly_quicker_kernel_is_preferred_to_the_usual_one() -> None:
    assert build_preference([one("flash", 1.0), one("fused", 0.95), one("written")]).plain[0] == "flash"
    assert build_preference([one("flash", 1.0), one("padded", 0.8), one("fused", 0.5)]).plain[0] == "fused"
    assert build_preference([one("flash", 1.0), one("fused", 0.5, error=1e-3)]).plain == ("flash", "written")


def test_draws_of_tokens_come_before_a_devices_own_and_those_before_the_written_formula() -> None:
    plain = [one("flash", 1.0), one("padded", 2.0), one("fused", 3.0), one("written")]
    dropped = [
        one("fused", 3.0, dropped=True),
        one("flash", 1.0, dropped=True, comparable=False, error=0.7),
        one("padded", 2.0, dropped=True, comparable=False, error=0.7),
        one("written", dropped=True),
    ]
    assert build_preference([*plain, *dropped]).dropped == ("fused", "flash", "padded", "written")
    bad = one("fused", dropped=True, error=0.5)
    assert build_preference([*plain, bad, *dropped[1:]]).dropped == ("flash", "padded", "written")
    wrong_flash = one("flash", 1.0, error=0.5)
    assert "flash" not in build_preference([wrong_flash, *plain[1:], *dropped]).dropped


def test_without_a_preference_the_usual_kernel_is_picked() -> None:
    assert pick(["fused", "padded"], dropped=True) == "fused"


def loss_off_by(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    softmax_loss = pytest.importorskip("encoder_core.kernels.softmax_loss", reason="Triton is not installed")
    right = softmax_loss.overwrite_with_gradient

    def overwrite_with_gradient(logits: Tensor, *given: Any, **how: Any) -> Tensor:
        by_bias: Tensor = right(logits, *given, **how)
        logits *= factor
        return by_bias

    monkeypatch.setattr(cross_entropy, "_supports", lambda features: True)
    monkeypatch.setattr(softmax_loss, "overwrite_with_gradient", overwrite_with_gradient)


def update_off_by(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    kernels = pytest.importorskip("encoder_core.kernels.stable_adamw", reason="Triton is not installed")
    right = kernels.update_weights

    def update_weights(*given: Any) -> None:
        right(*given[:-1], given[-1] | {"lr": given[-1]["lr"] * factor})

    monkeypatch.setattr(adamw, "_supports", lambda p: True)
    monkeypatch.setattr(kernels, "update_weights", update_weights)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(
    ("place", "off_by", "factor"),
    [
        pytest.param("loss", loss_off_by, 1.01, marks=pytest.mark.long),
        ("update", update_off_by, 1.001),
    ],
)
def test_a_kernel_of_another_place_is_used_once_it_is_right(
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    off_by: Callable[[pytest.MonkeyPatch, float], None],
    factor: float,
    right: bool,
) -> None:
    """The written formula is used until then. Where the run's optimizer is another, no update is tried."""
    off_by(monkeypatch, 1.0 if right else factor)
    network = BertConfig(**SHAPE | {"layers": 1}, dropout=0.0, attention_dropout=0.0)
    found = [one for one in reported(network, stable=True).found if one.place == place]
    assert [one.kernel for one in found] == ["fused", "written"]
    assert [one.is_right for one in found] == [right, True]
    order = build_preference(found)
    assert order.elsewhere == {place: ("fused", "written") if right else ("written",)}
    assert pick(["fused", "written"], dropped=False, place=place) == "written"
    try:
        set_preference(order)
        assert pick(["fused", "written"], dropped=False, place=place) == order.elsewhere[place][0]
    finally:
        set_preference(None)
    assert not [one for one in reported(network).found if one.place == "update"]


def test_a_kernel_elsewhere_must_be_right_with_dropout_and_without() -> None:
    tried = [
        one("fused", dropped=dropped, place="norm", error=error) for dropped, error in ((False, 1e-7), (True, 1.0))
    ]
    assert build_preference(tried).elsewhere == {"norm": ("written",)}
    assert build_preference(tried).kernels_at("attention", dropped=True) == ()
    assert build_preference([]) == Preference((), ())
