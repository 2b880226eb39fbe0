"""Seats: whoever comes to be where, every rank knows its place among the others and its GPU."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.rank_group import Seat, Spot, ordered, seats

SPOTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 15)), min_size=1, max_size=12, unique=True
).map(
    lambda found: [
        Spot(node, f"10.0.0.{ord(node)}", 100 + n, (str(gpu),)) for n, (node, gpu) in enumerate(found)
    ]
)


def seated(spots: list[Spot]) -> list[tuple[Spot, Seat]]:
    order = ordered(spots)
    assert sorted(order) == list(range(len(spots)))
    placed = [spots[index] for index in order]
    return list(zip(placed, seats(placed, 1234), strict=True))


@given(SPOTS)
def test_every_rank_has_a_seat_of_its_own(spots: list[Spot]) -> None:
    found = seated(spots)
    assert [seat.rank for _, seat in found] == list(range(len(spots)))
    assert {seat.master for _, seat in found} == {(found[0][0].address, 1234)}
    for node in {spot.node for spot in spots}:
        here = [(spot, seat) for spot, seat in found if spot.node == node]
        ranks = [seat.rank for _, seat in here]
        assert ranks == list(range(ranks[0], ranks[0] + len(here))), "the ranks of a node follow each other"
        assert [seat.local_rank for _, seat in here] == list(range(len(here)))
        assert {(seat.local_world, seat.node_rank) for _, seat in here} == {(len(here), here[0][1].node_rank)}


@given(SPOTS)
def test_a_local_rank_is_the_number_of_its_gpu(spots: list[Spot]) -> None:
    """Among those that it is let see, which are all that ranks of its node were given."""
    for spot, seat in seated(spots):
        visible = seat.environment()["CUDA_VISIBLE_DEVICES"].split(",")
        assert visible[seat.local_rank] == spot.gpus[0]
        assert visible == sorted(visible, key=int)
        assert seat.environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_ranks_on_cpus_say_nothing_of_gpus() -> None:
    ((_, seat),) = seated([Spot("a", "10.0.0.1", 7, ())])
    assert seat.environment() == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
