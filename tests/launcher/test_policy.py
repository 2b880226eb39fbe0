"""The failure policy, as a table of histories and answers."""

import pytest

from launcher.policy import (
    FRUITLESS,
    NODE_FAILURES,
    NODE_HOURS,
    SAME_ERROR,
    Failure,
    Restart,
    Stop,
    decide,
    where_it_began,
)

HOUR = 3600.0


def failure(hour: float = 0, step: int = 10, *, node: str | None = None, error: str | None = None) -> Failure:
    return Failure(hour * HOUR, step, worked=True, node=node, error=error)


def test_a_machine_that_dies_now_and_then_is_restarted_for_ever() -> None:
    failures = [failure(hour, step=10 * hour, node=f"n{hour % 5}") for hour in range(1, 200)]
    for count in range(1, len(failures)):
        assert decide(failures[:count], nodes=5) == Restart()


def test_the_same_error_at_the_same_step_ends_the_run() -> None:
    failures = [failure(step=7, error="ValueError: bad row")] * SAME_ERROR
    assert isinstance(decide(failures[:-1], nodes=4), Restart)
    decision = decide(failures, nodes=4)
    assert isinstance(decision, Stop)
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
    failures = [failure(step=7, error="ValueError: bad row")] * (SAME_ERROR - 1)
    assert decide([*failures, last], nodes=4) == Restart()


def test_starts_that_come_to_nothing_end_the_run() -> None:
    fruitless = Failure(0, 0, worked=False, node=None, error=None)
    assert decide([fruitless] * (FRUITLESS - 1), nodes=1) == Restart()
    assert isinstance(decide([fruitless] * FRUITLESS, nodes=1), Stop)
    assert decide([fruitless] * (FRUITLESS - 1) + [failure()], nodes=1) == Restart()
    assert decide([failure()] + [fruitless] * (FRUITLESS - 1), nodes=1) == Restart()


def test_a_node_that_keeps_failing_is_left_out() -> None:
    bad = [failure(hour, step=hour, node="bad") for hour in range(NODE_FAILURES)]
    assert decide(bad[:-1], nodes=4) == Restart()
    assert decide(bad, nodes=4) == Restart(frozenset({"bad"}))
    assert decide([*bad, failure(3, step=9, node="other")], nodes=4) == Restart(frozenset({"bad"}))


def test_an_old_failure_of_a_node_is_forgotten() -> None:
    bad = [failure(hour * NODE_HOURS, step=hour, node="bad") for hour in range(NODE_FAILURES)]
    assert decide(bad, nodes=4) == Restart()


def test_the_only_node_is_not_left_out() -> None:
    bad = [failure(hour, step=hour, node="bad") for hour in range(NODE_FAILURES)]
    assert decide(bad, nodes=1) == Restart()


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
    assert where_it_began({0: "a", 1: "a", 2: "b"}, errors, failed, blamed) == node


def test_a_rank_that_was_never_heard_of_is_nowhere() -> None:
    assert where_it_began({}, {0: "bad"}, [0], None) is None
    assert where_it_began({}, {0: "corrupt"}, [0], [0]) is None
