"""Networks of every kind on real ranks: the steps of a plain loop at every ZeRO stage. ALBERT's layers are one, DeBERTa
has its mask decoder; ELECTRA's two networks share an update, DeBERTa v3's have one each; students have teachers; text
vectors depend on the whole batch."""

import numpy as np
import pytest
import torch

from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import Stage
from tests.support.ranks import families
from tests.support.ranks.families import Job
from tests.support.ranks.forked import run_ranks

pytestmark = pytest.mark.cluster

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
AT: dict[str, Stage] = {
    "albert": 0,
    "deberta": 1,
    "deberta v2": 2,
    "modernbert": 3,
    "eurobert": 0,
    "xlm": 1,
    "xlnet": 3,
    "electra": 1,
    "deberta v3": 2,
    "distilbert": 2,
    "tinybert": 3,
    "roberta with vectors": 1,
    "electra with vectors": 3,
}
NAMES = tuple(AT)
SOME = [Job(name, stage, steps=range(2)) for name, stage in AT.items()]
ALL = {stage: [Job(name, stage, steps=range(4)) for name in NAMES] for stage in STAGES}
ALL[3] += [Job(name, 3, compiled=True) for name in NAMES]  # gathers a compiled layer as a whole
SETTINGS: list[tuple[Stage, Precision]] = [
    *((stage, "fp32") for stage in STAGES),
    (1, "bf16"),
    (2, "bf16"),
    (3, "bf16"),
]
PAIRS = [Job("deberta v3", stage, precision) for stage, precision in SETTINGS]


@pytest.mark.parametrize(
    ("world", "jobs"),
    [
        (2, SOME),
        *(pytest.param(world, ALL[s], marks=pytest.mark.long) for world in (1, 2) for s in STAGES),
    ],
)
def test_steps_equal_those_of_one_process_and_teachers_stay(world: int, jobs: list[Job]) -> None:
    """No state of the optimizer and no fragment of a checkpoint is a teacher's."""
    for job, *ranks in zip(jobs, *run_ranks(families.train, world, jobs), strict=True):
        norms, weights = families.alone(job.network, len(job.steps))
        first = families.teachers_of(families.fresh(job.network))
        teachers = [p.detach().numpy() for network in first for p in network.parameters()]
        for trace in ranks:
            np.testing.assert_allclose(trace.norms, norms, rtol=1e-5, err_msg=str(job))
            assert trace.state.keys() == weights.keys()
            for name, expected in weights.items():
                error = np.abs(trace.state[name]["master"].ravel() - expected).max()
                assert error < 5e-6, (job, name)
            for found, was in zip(trace.teachers, teachers, strict=True):
                assert np.array_equal(found, was), job
            assert trace.damage_found == (world > 1 and bool(teachers)), job


@pytest.mark.long
def test_in_bf16_teachers_are_rounded_once_and_stay_so() -> None:
    first = families.teachers_of(families.fresh("distilbert"))
    rounded = [p.detach().bfloat16().float() for network in first for p in network.parameters()]
    jobs = [Job("distilbert", stage, precision, range(10)) for stage, precision in SETTINGS if precision == "bf16"]
    for rank in run_ranks(families.train, 2, jobs):
        for job, trace in zip(jobs, rank, strict=True):
            pairs = zip(trace.teachers, rounded, strict=True)
            assert all(torch.equal(torch.from_numpy(found), was) for found, was in pairs), job
            assert np.isfinite(trace.norms).all(), job
            assert trace.damage_found, job


@pytest.mark.long
def test_two_updates_a_step_resume_bit_for_bit_at_every_stage() -> None:
    for job, (whole, resumed) in zip(PAIRS, run_ranks(families.train_twice, 2, PAIRS)[0], strict=True):
        assert whole.norms[2:] == resumed.norms, job
        assert whole.updates == resumed.updates == {"generator": 4, "discriminator": 4}
        for name, kinds in whole.state.items():
            for kind, values in kinds.items():
                assert np.array_equal(values, resumed.state[name][kind]), (job, name, kind)


@pytest.mark.long
def test_an_update_whose_gradient_is_not_finite_is_skipped_alone_at_every_stage() -> None:
    found = run_ranks(families.train_poisoned, 2, PAIRS)[0]
    for job, (before, poisonings) in zip(PAIRS, found, strict=True):
        for poisoned, after in poisonings.items():
            assert after.updates == {"generator": 2, "discriminator": 2} | {poisoned: 1}
            for name, kinds in before.state.items():
                same = all(np.array_equal(values, after.state[name][kind]) for kind, values in kinds.items())
                assert same == name.startswith(poisoned), (job, poisoned, name)
