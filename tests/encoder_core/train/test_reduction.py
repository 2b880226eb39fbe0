"""The gradient of a step: the sum over its microbatches, the same however many ranks share them, at every stage."""

import numpy as np
import pytest
import torch

from tests.support.ranks import replicas
from tests.support.ranks.forked import run_cases
from tests.support.ranks.replicas import Reduced
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

BF16 = [Setting(stage, "bf16", clip=None) for stage in (1, 2, 3)]
REDUCED_IN_BF16 = [Setting(stage, "bf16", clip=None, reduce_dtype="bf16") for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def shared() -> list[list[Reduced]]:
    """On three ranks, by setting: not a power of two, so dividing by it rounds."""
    return run_cases(replicas.first_gradient, 3, BF16 + REDUCED_IN_BF16)


def distance(gradient: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))


@pytest.mark.long
def test_ranks_add_up_gradients_in_the_dtype_asked_for(shared: list[list[Reduced]]) -> None:
    for setting, ranks in zip(BF16 + REDUCED_IN_BF16, shared, strict=True):
        expected = {"float32"} if setting.reduce_dtype == "fp32" else {"bfloat16"}
        assert [rank.dtypes for rank in ranks] == [expected] * 3, setting


def test_every_microbatch_counts_once_and_the_number_of_ranks_does_not_matter(
    shared: list[list[Reduced]],
) -> None:
    """Three ranks find what plain PyTorch finds alone, microbatch after microbatch. Where its kernels use more threads
    a few bf16 roundings differ, by 1e-4 in all; adding up in bf16 costs 2e-3, scaling the loss by 3 ranks 4e-3."""
    alone = replicas.reference(torch.bfloat16)
    for setting, ranks in zip(BF16, shared, strict=False):
        assert distance(replicas.assemble(ranks), alone) < 5e-4, setting
    for setting, ranks in zip(REDUCED_IN_BF16, shared[3:], strict=True):
        assert 1e-3 < distance(replicas.assemble(ranks), alone) < 0.01, setting
