"""Layers by the kernel of residual, dropout and norm, interpreted, against the same layers as written."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.cost.products import Shape
from encoder_core.layers import residual
from encoder_core.layers.kernel_choice import asked, only
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns

FAMILIES = {"roberta", "deberta v2", "modernbert", "eurobert", "xlnet"}
SHAPE = Shape(2, 16, 3)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if n.name in FAMILIES], ids=lambda network: network.name
)
def test_gradients_of_a_network_are_those_of_the_written_formula(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual, "_takes", lambda *_: True)
    torch.manual_seed(0)
    module = build(network).train()
    batch = full_rows(network, SHAPE)
    kernels, fused = [], residual._fused
    monkeypatch.setattr(residual, "_fused", lambda *given: kernels.append(1) or fused(*given))

    def gradients() -> dict[str, Tensor]:
        module.zero_grad()
        torch.manual_seed(3)
        remembered = memory(network, module, batch)
        for losses in turns(module, batch, remembered):
            sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    with asked() as places, only("written"):
        written = gradients()
    assert not kernels
    for dropped in {place[1] for place in places if place[0] == "norm"}:
        assert list(places["norm", dropped]) == ["fused", "written"]  # so a trial tries it
    with only("fused", "norm"):
        found = gradients()
    assert kernels
    assert found.keys() == written.keys()
    for name, gradient in written.items():
        largest = float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(found[name] / largest, gradient / largest, rtol=0.0, atol=1e-5, msg=name)
