"""XLNet's memory in training: recomputed where it is meant to be, carried in a checkpoint elsewhere. On any ranks, and
where it is not kept: faults/rank/test_killed_xlnet.py."""

from dataclasses import replace

import numpy as np
import pytest

from encoder_core.train.settings import MEMORY_KIND, MemoryRefresh
from tests.support.ranks import xlnet_memory as small
from tests.support.ranks.forked import run_cases
from tests.support.ranks.small_training import Setting
from tests.support.ranks.xlnet_memory import Checkpoint, Job, Trace

STAGES = [Setting(stage) for stage in (0, 1, 2, 3)]
SETTINGS = [*STAGES, Setting(2, "bf16")]
CUT = 4  # a step between two refreshes


def run(world: int, *jobs: Job) -> list[list[Trace]]:
    """All ranks' traces of each job."""
    return run_cases(small.train, world, list(jobs))


@pytest.fixture(scope="module")
def started() -> list[list[Trace]]:
    whole, half = [Job(setting) for setting in SETTINGS], [Job(setting, CUT) for setting in SETTINGS]
    return run(2, *whole, *half)


@pytest.fixture(scope="module")
def whole(started: list[list[Trace]]) -> list[list[Trace]]:
    """Undisturbed, by setting."""
    return started[: len(SETTINGS)]


@pytest.fixture(scope="module")
def half(started: list[list[Trace]]) -> list[Checkpoint]:
    """Stopped at `CUT`, by setting."""
    return [small.assemble(traces) for traces in started[len(SETTINGS) :]]


@pytest.mark.long
@pytest.mark.cluster
def test_memory_is_what_it_is_meant_to_be(whole: list[list[Trace]], half: list[Checkpoint]) -> None:
    """Against plain PyTorch in one process, at every ZeRO stage; one of two ranks idles in every second round."""
    losses, _, _ = small.alone(small.STEPS)
    _, model, memory = small.alone(CUT)
    names = dict(model.named_parameters())
    for setting, traces, kept in zip(STAGES, whole, half, strict=False):
        np.testing.assert_allclose(traces[0].losses, losses, rtol=1e-5, err_msg=str(setting))
        for layer in range(2):
            expected = np.concatenate([memory[index][layer].numpy() for index in range(small.MICROBATCHES)])
            found = kept.kept[f"{MEMORY_KIND}.{layer}"][MEMORY_KIND].reshape(kept.shapes[f"{MEMORY_KIND}.{layer}"])
            assert found.shape == (6, 8, 32)
            np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=str(setting))
        for name, parameter in names.items():
            flat = parameter.detach().numpy().ravel()
            np.testing.assert_allclose(kept.kept[name]["master"], flat, atol=2e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.cluster
def test_every_held_out_microbatch_and_the_last_save_are_signs_of_life(whole: list[list[Trace]]) -> None:
    """A8: a long evaluation and a slow upload are not judged by the limit of a step. On every rank."""
    for trace in whole[0]:
        evaluations = [
            told
            for step in range(0, small.STEPS + 1, 2)  # what the run begins with first
            for told in [(step, "evaluating", 0), (step, "evaluating", 1), (step, "training", 0)]
        ]
        assert trace.told == [*evaluations, (small.STEPS, "saving", 0)]


@pytest.mark.long
@pytest.mark.cluster
def test_resume_between_two_refreshes_is_bit_identical(whole: list[list[Trace]], half: list[Checkpoint]) -> None:
    """And without its memory a run is another one, so this would notice if it were lost."""
    forgetful = replace(
        half[2], shapes={name: shape for name, shape in half[2].shapes.items() if name not in half[2].memory}
    )
    jobs = [Job(setting, resumed=kept) for setting, kept in zip(SETTINGS, half, strict=True)]
    *resumed, other = run(2, *jobs, Job(Setting(2), resumed=forgetful))
    for setting, undisturbed, after in zip(SETTINGS, whole, resumed, strict=True):
        assert after[0].losses == undisturbed[0].losses[CUT:], setting
        same(small.assemble(after), small.assemble(undisturbed))
    assert other[0].losses[0] != whole[2][0].losses[CUT]


def same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.shapes == b.shapes
    for name, kinds in a.kept.items():
        for kind, values in kinds.items():
            assert np.array_equal(values, b.kept[name][kind]), (name, kind)


def test_when_memory_is_recomputed() -> None:
    refresh = MemoryRefresh(every=10, steps=2)
    expected = {0: [], 1: None, 9: None, 10: [8, 9], 20: [18, 19]}
    for step, before in expected.items():
        found = refresh.recomputed_steps(step, 0)
        assert (None if found is None else list(found)) == before
    assert refresh.recomputed_steps(33, 33) == range(33, 33), "a phase begins with nothing"
    assert list(refresh.recomputed_steps(10, 9) or ()) == [9], "and remembers nothing of the phase before"
    assert refresh.recomputed_steps(34, 33) is None
