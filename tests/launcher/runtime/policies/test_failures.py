"""The failure policy, as a table of histories and answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runtime.policies.failures import (
    FAILED_START_LIMIT,
    NODE_FAILURE_HOURS,
    NODE_FAILURE_LIMIT,
    SAME_ERROR_LIMIT,
    SILENT_DEATH_LIMIT,
    UNSAVED_FAILURE_LIMIT,
    Failure,
    FailureKind,
    RestartDecision,
    StopDecision,
    decide_after_failure,
    find_first_failed_node,
)

HOUR = 3600.0


def failure(
    hour: float = 0,
    step: int = 10,
    *,
    committed: int | None = None,
    worked: bool = True,
    node: str | None = None,
    error: str | None = None,
    kind: FailureKind | None = None,
) -> Failure:
    """A death without a word unless there is an error; with a checkpoint at every step."""
    return Failure(
        time=hour * HOUR,
        step=step,
        committed=step if committed is None else committed,
        worked=worked,
        node=node,
        error=error,
        kind=kind or ("silent" if error is None else "raised"),
    )


RAISED = failure(step=0, worked=False, error="OSError: no space")
KILLED = failure(step=0, worked=False)
AWAY = failure(step=0, worked=False, error="StoreUnavailable: no answer", kind="transient")


def test_a_machine_that_dies_now_and_then_is_restarted_for_ever() -> None:
    failures = [failure(hour, step=10 * hour, node=f"n{hour % 5}") for hour in range(1, 200)]
    for count in range(1, len(failures)):
        assert decide_after_failure(failures[:count], node_count=5) == RestartDecision()


def test_the_same_error_at_the_same_step_ends_the_run() -> None:
    failures = [failure(step=7, error="ValueError: bad row")] * SAME_ERROR_LIMIT
    assert isinstance(decide_after_failure(failures[:-1], node_count=4), RestartDecision)
    decision = decide_after_failure(failures, node_count=4)
    assert isinstance(decision, StopDecision)
    assert "step 7" in decision.reason
    assert "bad row" in decision.reason


@pytest.mark.parametrize(
    "last",
    [
        failure(step=8, error="ValueError: bad row"),
        failure(step=7, error="ValueError: another"),
        failure(step=7),
    ],
)
def test_errors_that_differ_do_not(last: Failure) -> None:
    failures = [failure(step=7, error="ValueError: bad row")] * (SAME_ERROR_LIMIT - 1)
    assert decide_after_failure([*failures, last], node_count=4) == RestartDecision()


def test_starts_that_raise_before_a_step_end_the_run() -> None:
    errors = [failure(step=0, worked=False, error=f"E{n}") for n in range(FAILED_START_LIMIT)]
    assert decide_after_failure(errors[:-1], node_count=1) == RestartDecision()
    decision = decide_after_failure(errors, node_count=1)
    assert isinstance(decision, StopDecision)
    assert "finishing" in decision.reason
    assert decide_after_failure([RAISED] * (SAME_ERROR_LIMIT - 1) + [failure()], node_count=1) == RestartDecision()
    assert decide_after_failure([failure()] + [RAISED] * (SAME_ERROR_LIMIT - 1), node_count=1) == RestartDecision()


@given(
    st.lists(st.sampled_from(["silent", "silent", "silent", "silent", "raised", "transient"]), max_size=12),
    st.integers(0, 12),
)
def test_memory_is_saved_where_ranks_die_again_and_again_and_get_no_further(
    kinds: list[FailureKind], progress: int
) -> None:
    """The kernel kills without a word who has no memory. A store that is away says nothing about it."""
    failures = [
        failure(step=10 + index % 3, committed=5 + (index >= progress), kind=kind) for index, kind in enumerate(kinds)
    ]
    last = [failure for failure in failures if failure.kind != "transient"][-SILENT_DEATH_LIMIT:]
    alike = len(last) == SILENT_DEATH_LIMIT and {(one.kind, one.committed) for one in last} in (
        {("silent", 5)},
        {("silent", 6)},
    )
    assert decide_after_failure(failures, node_count=1) == RestartDecision(frugal=alike)


def test_quick_deaths_after_a_group_that_made_steps_do_not_cost_its_copies() -> None:
    worked = failure(step=20, committed=0)
    quick = [failure(step=0, committed=0, worked=False)] * SILENT_DEATH_LIMIT
    assert decide_after_failure([worked, *quick[1:]], node_count=1) == RestartDecision()
    assert decide_after_failure([worked, *quick], node_count=1) == RestartDecision(frugal=True), (
        "none of them made a step"
    )


def test_the_last_of_many_failures_is_told() -> None:
    starts = [failure(step=0, worked=False, error="RayLost: no Ray", kind="silent")] * UNSAVED_FAILURE_LIMIT
    decision = decide_after_failure(starts, node_count=1)
    assert isinstance(decision, StopDecision)
    assert starts[0].error is not None
    assert starts[0].error in decision.reason
    assert isinstance(decide_after_failure(starts[1:], node_count=1), RestartDecision)


def test_nor_do_they_hide_an_error_that_comes_back() -> None:
    assert isinstance(
        decide_after_failure([RAISED, KILLED, RAISED, KILLED, KILLED, RAISED], node_count=1), StopDecision
    )
    assert decide_after_failure([RAISED, KILLED, RAISED, failure(step=3), RAISED], node_count=1) == RestartDecision(), (
        "a step was made"
    )


def test_deaths_without_a_newer_checkpoint_end_the_run_at_last() -> None:
    deaths = [
        failure(n, step=50 + n, committed=40, error=f"E{n}" if n % 3 else None) for n in range(UNSAVED_FAILURE_LIMIT)
    ]
    assert isinstance(decide_after_failure(deaths, node_count=4), StopDecision)
    assert decide_after_failure([failure(step=40, committed=20), *deaths[1:]], node_count=4) == RestartDecision()


def test_a_store_that_does_not_answer_counts_towards_nothing() -> None:
    assert decide_after_failure([AWAY] * (3 * UNSAVED_FAILURE_LIMIT), node_count=4) == RestartDecision()
    assert decide_after_failure([RAISED, AWAY, RAISED, AWAY], node_count=4) == RestartDecision()
    assert isinstance(decide_after_failure([RAISED, AWAY, RAISED, AWAY, RAISED], node_count=4), StopDecision)


def test_a_node_that_keeps_failing_is_left_out() -> None:
    bad = [failure(hour, step=hour, node="bad") for hour in range(NODE_FAILURE_LIMIT)]
    assert decide_after_failure(bad[:-1], node_count=4) == RestartDecision()
    assert decide_after_failure(bad, node_count=4) == RestartDecision(frozenset({"bad"}))
    assert decide_after_failure([*bad, failure(3, step=9, node="other")], node_count=4) == RestartDecision(
        frozenset({"bad"})
    )


def test_an_old_failure_of_a_node_is_forgotten() -> None:
    bad = [failure(hour * NODE_FAILURE_HOURS, step=hour, node="bad") for hour in range(NODE_FAILURE_LIMIT)]
    assert decide_after_failure(bad, node_count=4) == RestartDecision()


def test_the_only_node_is_not_left_out() -> None:
    bad = [failure(hour, step=hour, node="bad") for hour in range(NODE_FAILURE_LIMIT)]
    assert decide_after_failure(bad, node_count=1) == RestartDecision()


@pytest.mark.parametrize(
    ("errors", "failed", "blamed", "node"),
    [
        ({}, [], None, None),  # all were killed, on several nodes
        ({1: "lost peer", 2: "lost peer"}, [], None, "a"),  # rank 0 died without a word
        ({1: "lost peer"}, [], None, None),  # ranks 0 and 2 did
        ({1: "lost peer"}, [2], None, "b"),  # and Ray saw which ended the group
        ({2: "bad", 0: "lost", 1: "lost"}, [], None, "b"),  # all raised: the first to tell
        ({0: "corrupt", 1: "corrupt", 2: "corrupt"}, [0], [2], "b"),  # all raised, one is to blame
        ({0: "corrupt", 1: "corrupt", 2: "corrupt"}, [0], [], None),  # nobody knows which
        ({0: "corrupt", 1: "corrupt", 2: "corrupt"}, [0], [0, 2], None),  # ranks of two nodes
        ({0: "corrupt", 1: "corrupt", 2: "corrupt"}, [0], [0, 1], "a"),  # two of one
    ],
)
def test_where_a_failure_began(
    errors: dict[int, str], failed: list[int], blamed: list[int] | None, node: str | None
) -> None:
    assert find_first_failed_node({0: "a", 1: "a", 2: "b"}, errors, failed, blamed) == node


def test_a_rank_that_was_never_heard_of_is_nowhere() -> None:
    assert find_first_failed_node({}, {0: "bad"}, [0], None) is None
    assert find_first_failed_node({}, {0: "corrupt"}, [0], [0]) is None
