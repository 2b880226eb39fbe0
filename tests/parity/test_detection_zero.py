"""ELECTRA and DeBERTa v3 on two real ranks: two plain networks exactly, at every ZeRO stage."""

import numpy as np
import pytest

from encoder_core.train.zero_memory import Stage
from tests.support.ranks import replaced_tokens as ranks
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.replaced_tokens import Setting, Trace

pytestmark = pytest.mark.cluster

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
FAMILIES = ("electra", "deberta")
SOME = {"electra": ((1, 3), 4), "deberta": ((0, 2), 4)}  # stages and steps; all are tried by the long form
ONE_STEP = [Setting(family, stage, clip=None) for family in FAMILIES for stage in (1, 2, 3)]
WORDS = "generator.encoder.embeddings.word.weight"
DELTA = "discriminator.encoder.embeddings.word.weight"


def named(trace: Trace) -> Trace:
    """Without the test's wrapper in the names."""
    state = {name.removeprefix("model."): kinds for name, kinds in trace.state.items()}
    return Trace(trace.norms, state, trace.updates, trace.shared)


@pytest.fixture(scope="module")
def traces() -> dict[Setting, Trace]:
    """One of the two ranks is idle in half of the rounds."""
    return trained(ONE_STEP)


def trained(settings: list[Setting]) -> dict[Setting, Trace]:
    return dict(zip(settings, map(named, run_ranks(ranks.train, 2, settings)[0]), strict=True))


@pytest.mark.parametrize(
    ("family", "stages", "steps"),
    [
        *((family, *stages) for family, stages in SOME.items()),
        *(pytest.param(family, STAGES, 10, marks=pytest.mark.long) for family in FAMILIES),
    ],
)
def test_steps_equal_two_plain_networks(family: str, stages: tuple[Stage, ...], steps: int) -> None:
    norms, weights = ranks.reference(family, steps)
    assert len(norms[0]) == (1 if family == "electra" else 2)
    traces = trained([Setting(family, stage, steps=steps) for stage in stages])
    for stage in stages:
        found = traces[Setting(family, stage, steps=steps)]
        assert found.state.keys() == weights.keys()
        np.testing.assert_allclose(found.norms, norms, rtol=1e-5, err_msg=f"stage {stage}")
        for name, expected in weights.items():
            np.testing.assert_allclose(
                found.state[name]["master"], expected, rtol=0, atol=5e-6, err_msg=f"stage {stage} {name}"
            )


def gradient(trace: Trace, name: str) -> np.ndarray:
    """After one step without clipping a first moment is 0.1 times the gradient."""
    return trace.state[name]["exp_avg"] / np.float32(0.1)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_electras_embeddings_learn_from_both_networks(traces: dict[Setting, Trace], stage: Stage) -> None:
    found = traces[Setting("electra", stage, clip=None)]
    assert found.shared
    generator, discriminator = ranks.gradients("electra")
    tied = [name for name in found.state if ".embeddings." in name]
    assert len(tied) == 5  # words, positions, segments; weight and bias of the LayerNorm
    for name in tied:
        of_each = [part[name].numpy().ravel() for part in (generator, discriminator)]
        assert all(np.abs(part).max() > 1e-3 for part in of_each), name
        np.testing.assert_allclose(gradient(found, name), sum(of_each), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_debertas_embeddings_are_disentangled(traces: dict[Setting, Trace], stage: Stage) -> None:
    """E_G learns from the generator alone, E_delta from the discriminator alone."""
    found = traces[Setting("deberta", stage, clip=None)]
    assert not found.shared
    generator, discriminator = ranks.gradients("deberta")
    assert not discriminator[WORDS].any()
    assert not generator[DELTA].any()
    np.testing.assert_allclose(gradient(found, WORDS), generator[WORDS].flatten(), rtol=0, atol=1e-6)
    # that of E_delta is taken after the generator's update, which moved E_G by up to the learning rate
    off = np.abs(gradient(found, DELTA) - discriminator[DELTA].numpy().ravel()).max()
    assert 0 < off < 0.1 * discriminator[DELTA].abs().max()


@pytest.mark.long
def test_resume_is_bit_identical_at_every_stage() -> None:
    exact = [Setting("deberta", stage) for stage in STAGES]
    settings = [*exact, *(Setting("deberta", stage, "bf16") for stage in (1, 2, 3))]
    pairs = run_ranks(ranks.train_twice, 2, settings)[0]
    for setting, (whole, resumed) in zip(settings, pairs, strict=True):
        assert whole.norms[2:] == resumed.norms, setting
        assert whole.updates == resumed.updates == {"generator": 4, "discriminator": 4}
        for name, kinds in whole.state.items():
            for kind, values in kinds.items():
                assert np.array_equal(values, resumed.state[name][kind]), (setting, name, kind)


@pytest.mark.long
def test_a_turn_whose_gradient_is_not_finite_is_skipped_alone_at_every_stage() -> None:
    exact = [Setting("deberta", stage) for stage in STAGES]
    settings = [*exact, *(Setting("deberta", stage, "bf16") for stage in (1, 2, 3))]
    runs = run_ranks(ranks.train_poisoned, 2, settings)[0]
    for setting, (before, poisonings) in zip(settings, runs, strict=True):
        for poisoned, after in poisonings.items():
            assert sorted(after.updates.items()) == sorted(
                {"generator": 2, "discriminator": 2, poisoned: 1}.items()
            )
            for name, kinds in named(before).state.items():
                now = named(after).state[name]
                same = all(np.array_equal(values, now[kind]) for kind, values in kinds.items())
                assert same == name.startswith(poisoned), (setting, poisoned, name)
