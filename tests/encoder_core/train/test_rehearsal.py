"""Rehearsed passes leave nothing behind, of every family and objective; what runs out of memory is told."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_core.train.rehearsal import Rehearsal, is_out_of_memory, sums_are_verified
from encoder_core.train.step import Microbatch
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows


def engine_of(module: Any) -> Any:
    """What a rehearsal asks of an engine, without DeepSpeed."""
    groups = module.update_groups()

    def begin(group: str) -> None:
        for name, parameters in groups.items():
            for p in parameters:
                p.requires_grad_(name == group)

    return SimpleNamespace(
        objective=module,
        device=torch.device("cpu"),
        update_groups=tuple(groups),
        begin_update_group=begin,
        set_training=module.train,
    )


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_no_gradient_stays_and_a_second_time_is_spared(network: Network) -> None:
    module = build(network)
    calls = []
    module.register_forward_pre_hook(lambda *given: calls.append(1))
    rehearsal = Rehearsal(engine_of(module), kept=1 << 20)
    microbatch = Microbatch(0, full_rows(network))
    assert rehearsal.fits([microbatch], {})
    assert calls
    assert all(p.grad is None for p in module.parameters())
    calls.clear()
    assert rehearsal.fits([microbatch], {})
    assert rehearsal.fits([], {})
    assert not calls


@pytest.mark.long
def test_what_ran_out_is_asked_again_and_other_errors_pass() -> None:
    network = NETWORKS[0]
    module = build(network)
    rehearsal, microbatch = Rehearsal(engine_of(module), kept=0), Microbatch(0, full_rows(network))
    raised: list[RuntimeError] = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("another")]

    def fail(*given: Any) -> None:
        if raised:
            raise raised.pop(0)

    module.register_forward_pre_hook(fail)
    assert not rehearsal.fits([microbatch], {})
    with pytest.raises(RuntimeError, match="another"):
        rehearsal.fits([microbatch], {})
    assert rehearsal.fits([microbatch], {})


def test_the_hosts_own_error_is_one_of_memory() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(ValueError("something else"))


@pytest.mark.parametrize(
    ("measured", "known"),
    [
        ((0,), False),
        ((1,), True),
        ((1, 1), False),  # all were alone: nothing was summed between ranks
        ((2, 1), True),  # one stayed, a spare process took the other place
        ((2, 0), False),  # a new process
        ((8, 8, 8), True),
    ],
)
def test_sums_are_ensured_anew_unless_every_process_has(measured: tuple[int, ...], known: bool) -> None:
    assert sums_are_verified(measured) == known
