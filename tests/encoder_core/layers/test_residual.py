"""Layers by the kernel of residual, dropout and norm, interpreted, against the same layers as written."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.layers import residual
from encoder_core.layers.kernel_choice import force_kernel, record_requests
from launcher.runtime.capacity.workload import MicrobatchShape
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns
from tests.support.ranks import small_training
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.small_training import Setting

FAMILIES = {"roberta", "deberta v2", "modernbert", "eurobert", "xlnet"}
SHAPE = MicrobatchShape(2, 16, 3)


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.parametrize("network", [n for n in NETWORKS if n.name in FAMILIES], ids=lambda network: network.name)
def test_gradients_of_a_network_are_those_of_the_written_formula(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "_supports", lambda *_: True)
    torch.manual_seed(0)
    module = build(network).train()
    batch = full_rows(network, SHAPE)
    kernels, fused = [], residual._fused_norm
    monkeypatch.setattr(residual, "_fused_norm", lambda *given: kernels.append(1) or fused(*given))

    def gradients() -> dict[str, Tensor]:
        module.zero_grad()
        torch.manual_seed(3)
        remembered = memory(network, module, batch)
        for losses in turns(module, batch, remembered):
            sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    with record_requests() as places, force_kernel("written"):
        written = gradients()
    assert not kernels
    for dropped in {place[1] for place in places if place[0] == "norm"}:
        assert list(places["norm", dropped]) == ["fused", "written"]  # so a trial tries it
    with force_kernel("fused", "norm"):
        found = gradients()
    assert kernels
    assert found.keys() == written.keys()
    for name, gradient in written.items():
        largest = float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found[name] / largest, gradient / largest, rtol=0.0, atol=1e-5, msg=name)


@pytest.mark.cluster
@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_zero_3_trains_by_the_kernel_what_it_trains_without(interpreted: bool) -> None:
    """There a norm's weight has its numbers only in the norm's own pass, so the kernel must be launched in it."""
    settings = [Setting(3), Setting(3, "bf16")] if interpreted else [Setting(3)]
    found = run_ranks(small_training.train_fused, 2, settings, interpreted)
    for i, setting in enumerate(settings):
        written, fused = ([ways[way][i] for ways in found] for way in (0, 1))
        most = 2e-5 if setting.precision == "fp32" else 4e-3
        assert fused[0].steps[0][:2] == pytest.approx(written[0].steps[0][:2], rel=10 * most), setting
        apart = small_training.distance(small_training.assemble(fused), small_training.assemble(written))
        assert apart < most, setting
