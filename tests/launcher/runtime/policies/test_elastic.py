"""How many ranks, from tables of what there is and what is wanted."""

from typing import Any

import pytest

from launcher.errors import RecipeError
from launcher.runtime.cluster.resources import choose_sizing, data_worker_count, plan_resources, total_cpus, total_gpus
from launcher.runtime.policies.elastic import Sizing, Trainers, count_places, nodes_to_exclude, rank_count, should_grow
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe

ELASTIC = Sizing(least=2, most=8, expected=8, wait=60, grow=1800, each={"GPU": 1})
FIXED = Sizing(least=4, most=4, expected=4, wait=0, grow=float("inf"), each={"GPU": 1})


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("found", "wanted", "waited", "ranks"),
    [
        (8, 8, 0, 8),  # all are there
        (20, 8, 0, 8),  # never more than the most
        (5, 4, 0, 5),  # more than there were: taken at once
        (6, 8, 0, None),  # fewer: not at once
        (6, 8, 59, None),
        (6, 8, 60, 6),  # the machine has not come back
        (6, 99, 60, 6),
        (8, 99, 0, 8),  # no more can be wanted than the most
        (1, 8, 1e6, None),  # fewer than the least: never
        (0, 8, 1e6, None),
    ],
)
def test_an_elastic_run_starts_with_what_is_there_after_its_wait(
    found: int, wanted: int, waited: float, ranks: int | None
) -> None:
    assert rank_count(ELASTIC, found, wanted, waited) == ranks


@pytest.mark.parametrize(("found", "ranks"), [(3, None), (4, 4), (9, 4)])
def test_a_fixed_number_is_waited_for(found: int, ranks: int | None) -> None:
    assert rank_count(FIXED, found, wanted_ranks=4, waited_s=1e9) == ranks


@pytest.mark.parametrize(
    ("found", "world", "worked", "unchanged", "expected"),
    [
        (6, 4, 1800, 60, True),
        (6, 4, 1799, 60, False),  # only just begun
        (6, 4, 1800, 59, False),  # more machines may be on their way
        (4, 4, 9999, 999, False),
        (3, 4, 9999, 999, False),  # a node has gone, but no rank of ours was on it
        (9, 8, 9999, 999, False),  # as many as are wanted
    ],
)
def test_when_more_ranks_are_taken(found: int, world: int, worked: float, unchanged: float, expected: bool) -> None:
    assert should_grow(ELASTIC, found, world, worked, unchanged) is expected


def test_places_are_counted_on_living_nodes_only() -> None:
    nodes = [
        node("head", CPU=2),
        node("a", GPU=8, CPU=1.5),
        node("b", alive=False, GPU=8, CPU=99),
        node("c", GPU=4),
    ]
    assert count_places(nodes, {"GPU": 1.0}, ()) == 12
    assert count_places(nodes, {"GPU": 1.0}, {"a"}) == 4
    assert count_places(nodes, {"GPU": 1.0, "CPU": 0.25}, ()) == 6, "a GPU without a core for its process is no place"
    assert count_places(nodes, {"CPU": 1.0}, ()) == 3, "no rank on half a core"
    assert total_gpus(nodes) == 12


def test_a_bad_node_is_left_out_if_enough_places_remain() -> None:
    nodes = [node(name, GPU=4) for name in "abc"]
    four = frozenset[str]()
    assert nodes_to_exclude(nodes, FIXED, four, frozenset("a")) == {"a"}
    assert nodes_to_exclude(nodes, FIXED, frozenset("b"), frozenset("a")) == {"a", "b"}
    assert nodes_to_exclude(nodes, FIXED, frozenset("bc"), frozenset("a")) == {"b", "c"}, "no place would remain"
    assert nodes_to_exclude(nodes, FIXED, four, frozenset("abc")) == {"a", "b"}, "as many as can be exclude_nodes"


def recipe(*assignments: str) -> Recipe:
    """Twelve microbatches a step."""
    batch = "phases=[{steps: 8, length: 32, batch: {sequences: 48}}]"
    return load("quickstart", (batch, "microbatch=4", "schedule.warmup=1", *assignments))


@pytest.mark.parametrize(
    ("trainers", "gpus", "least", "most", "expected"),
    [
        ("8", 0, 8, 8, 8),
        ("8", 2, 8, 8, 8),
        ("64", 64, 12, 12, 12),  # no more than there are microbatches
        ("auto", 6, 1, 12, 1),
        ("{min: 4}", 6, 4, 12, 4),
        ("{min: 4, max: 6}", 16, 4, 6, 6),
        ("{min: 4, max: 64}", 16, 4, 12, 12),
        ("{max: 3}", 0, 1, 3, 3),
    ],
)
def test_what_a_recipe_asks_of_a_cluster(trainers: str, gpus: int, least: int, most: int, expected: int) -> None:
    size = choose_sizing(recipe(f"trainers={trainers}"), gpus)
    assert (size.least, size.most, size.expected) == (least, most, expected)


def test_without_gpus_auto_is_this_machine_as_it_is() -> None:
    size = choose_sizing(recipe("trainers=auto"), gpus=0)
    assert size.least == size.most == size.expected <= 2
    assert size.each == {"CPU": 0.25}
    elastic = choose_sizing(recipe("trainers={max: 3}"), gpus=0)
    assert (elastic.each, elastic.place) == ({"CPU": 0.75}, {"CPU": 1.0}), "a core, but for a data task"


@pytest.mark.parametrize("trainers", ["7", "auto", "{min: 7}", "{min: 5, max: 9}", "{min: 11, max: 12}"])
def test_a_cluster_started_here_has_room_for_the_least(trainers: str) -> None:
    asked = recipe(f"trainers={trainers}")
    cluster = [node("here", CPU=plan_resources(asked).local_cpus)]
    size = choose_sizing(asked, gpus=0)
    assert count_places(cluster, size.place, ()) >= size.least


def test_a_batch_by_tokens_has_at_least_the_microbatches_of_full_rows() -> None:
    assert recipe("phases=[{steps: 8, length: 32, batch: {tokens: 1000}}]").max_microbatches_per_step == 8
    assert recipe().max_microbatches_per_step == 12


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("trainers={min: 13}", "13 ranks cannot share 12 microbatches"),
        ("trainers={min: 4, max: 3}", "at least 4 ranks and at most 3"),
        ("trainers={least: 3}", "least is not a key"),
        ("trainers=0", "greater than 0"),
        ("trainers=some", "trainers"),
    ],
)
def test_impossible_numbers_are_refused(assignment: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        recipe(assignment)


def test_data_workers_are_counted_by_the_cluster_not_by_the_machine_that_starts_the_run() -> None:
    cluster = [
        node("head", CPU=2),
        node("a", CPU=96, GPU=8),
        node("b", CPU=96, GPU=8),
        node("c", alive=False, CPU=96),
    ]
    cores = total_cpus(cluster)
    assert data_worker_count(recipe("data_service.workers=auto"), cores, ranks=16) == 64, "four a rank"
    assert data_worker_count(recipe("data_service.workers=auto"), cores, ranks=128) == 97, "half of the cores"
    assert data_worker_count(recipe("data_service.workers=auto"), 1, ranks=1) == 1


def test_the_bounds_are_kept_with_the_run() -> None:
    asked = recipe("trainers={min: 2, max: 6, wait: 5, grow: 60}")
    assert asked.trainers == Trainers(min=2, max=6, wait=5, grow=60)
    assert load("quickstart", (f"trainers={asked.to_data()['trainers']}".replace("'", ""),)).trainers == asked.trainers
