"""MFU: counted FLOPs over the devices' peak."""

import pytest
import torch

import launcher.runtime.rank.journal
from launcher.runtime.capacity.devices import GIB, match_gpu_by_device_name
from launcher.runtime.capacity.workload import MicrobatchShape, model_cost, targets_per_row
from launcher.runtime.rank.journal import Utilisation, run_utilisation
from launcher.runtime.recipe.load import load

CPU = torch.device("cpu")


def test_it_is_what_a_step_needs_over_what_the_devices_could_do() -> None:
    meter = Utilisation(ends=(10, 30), flops=(1e6, 3e6), peak=1e12)
    assert meter.share(step=9, tokens=1000, seconds=0.5) == pytest.approx(0.002)
    assert meter.share(step=10, tokens=1000, seconds=0.5) == pytest.approx(0.006)
    assert meter.share(step=30, tokens=1000, seconds=0.5) == pytest.approx(0.006)


def test_the_flops_are_those_that_estimate_counts_without_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every phase; a vocabulary that the tokenizer decides is the tokenizer's."""
    monkeypatch.setattr(launcher.runtime.rank.journal, "peak_flops", lambda device, precision: 1e12)
    recipe = load("bert-base", ("activation_checkpointing=true", "model.layers=2"))
    meter = run_utilisation(recipe, 30522, CPU, ranks=3)
    assert meter is not None
    assert meter.peak == 3e12
    assert len(meter.flops) == len(recipe.phases) > 1
    for phase, flops in zip(recipe.phases, meter.flops, strict=True):
        shape = MicrobatchShape(64, phase.length, targets_per_row(recipe, phase.length))
        known = recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab": 30522})})
        assert flops == pytest.approx(model_cost(known, shape).model / shape.tokens)


def test_a_cpu_has_none() -> None:
    assert run_utilisation(load("quickstart"), 1000, CPU, ranks=2) is None


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 80 * GIB, "H100"),
        ("NVIDIA A100-SXM4-80GB", 79 * GIB, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", 39 * GIB, "A100-40"),
        ("Tesla V100-SXM2-32GB", 32 * GIB, "V100"),
        ("NVIDIA A10G", 22 * GIB, "A10G"),
        ("NVIDIA L4", 22 * GIB, "L4"),
        ("NVIDIA L40S", 45 * GIB, "L40S"),
        ("AMD Instinct MI300X", 191 * GIB, "MI300X"),
        ("NVIDIA H100 PCIe", 80 * GIB, None),
        ("NVIDIA H100 NVL", 94 * GIB, None),
        ("NVIDIA GeForce RTX 4090", 24 * GIB, None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, memory: int, expected: str | None) -> None:
    found = match_gpu_by_device_name(name, memory)
    assert (found.name if found else None) == expected
