"""Private names of DeepSpeed that go or are used no more end an engine's start; they never give another number."""

import random

import pytest

from encoder_core.train import deepspeed_internals as internals
from tests.support.ranks import renamed
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.renamed import Case

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(run_ranks(renamed.cases, 2)[0])


@pytest.mark.long
def test_what_is_there_is_taken_for_it() -> None:
    """Known gradients of two ranks add up, at every stage and precision; else no other test here says anything."""
    nothing: list[Case] = [(*setting, "nothing", "") for setting in renamed.SETTINGS]
    for ranks in run_ranks(renamed.each, 2, nothing):
        assert all(float(error) < 1e-6 for error in ranks)


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_name_that_is_gone_is_an_error_that_says_so(cases: list[Case], share: int) -> None:
    names = {"_global_grad_norm", "all_gather", "hp_fragment_address", "ds_numel", "bit16_groups", "fp16_groups"}
    assert {name for _, _, _, name in cases} >= names
    named = [case for case in cases if case[2] != "other"]
    chosen = random.Random(0).sample(named, len(named) // share)
    for case, problem in zip(chosen, run_ranks(renamed.each, 2, chosen)[0], strict=True):
        assert "deepspeed 0." in problem, case
        assert case[3] in problem, case


@pytest.mark.parametrize("old_stays", [False, True])
def test_a_mean_where_the_sum_is_meant_is_an_error(old_stays: bool) -> None:
    """Of two ranks: the gradient's norm would be half of what it is, in silence."""
    for ranks in run_ranks(renamed.upstream, 2, old_stays, ["fp32", "bf16"]):
        for problem in ranks:
            assert (renamed.DIVISOR in problem) != old_stays
            assert ("ZeRO 3" in problem) == old_stays


@pytest.mark.long
def test_methods_that_are_replaced_and_never_called_are_errors() -> None:
    cases = [(1, "bf16", "buffered_allreduce_fallback")]
    cases += [(s, p, name) for s in (2, 3) for p in ("fp32", "bf16") for name in internals.REDUCERS]
    for ranks in run_ranks(renamed.idle, 2, cases):
        for (_, _, name), problem in zip(cases, ranks, strict=True):
            assert name in problem
