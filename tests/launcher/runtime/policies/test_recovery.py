"""Partners of random layouts of nodes, against what a placement of copies must satisfy."""

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from launcher.runtime.policies.recovery import PROCESS_BYTES, copy_partners, spare_counts

LAYOUTS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60)


@given(LAYOUTS)
def test_a_copy_is_on_another_node_whenever_there_is_one(nodes: list[str]) -> None:
    found = copy_partners(nodes)
    if len(set(nodes)) > 1:
        assert all(nodes[partner] != nodes[rank] for rank, partner in enumerate(found))
    elif len(nodes) > 1:
        assert all(partner != rank for rank, partner in enumerate(found))
        assert sorted(found) == list(range(len(nodes)))
    else:
        assert found == [0]


@given(LAYOUTS)
def test_copies_are_shared_out_as_evenly_as_the_nodes_allow(nodes: list[str]) -> None:
    kept = Counter(copy_partners(nodes))
    most = max(Counter(nodes).values())
    if len(set(nodes)) == 1 or 2 * most <= len(nodes):
        assert set(kept.values()) == {1}
        return
    others = len(nodes) - most  # they keep all that the largest node has, and it keeps one of each of them
    assert max(kept.values()) == -(-most // others)
    large = Counter(nodes).most_common(1)[0][0]
    counts = [kept[rank] for rank in range(len(nodes)) if nodes[rank] != large]
    assert max(counts) - min(counts) <= 1
    assert all(kept[rank] <= 1 for rank in range(len(nodes)) if nodes[rank] == large)


@given(st.integers(2, 40), st.integers(1, 8))
def test_equal_nodes_keep_each_others_copies_rank_by_rank(count: int, each: int) -> None:
    found = copy_partners([f"node-{rank // each}" for rank in range(count * each)])
    for rank, partner in enumerate(found):
        assert partner % each == rank % each
        assert (partner // each - rank // each) % count == count // 2


@given(LAYOUTS, st.randoms())
def test_names_of_nodes_do_not_matter(nodes: list[str], random: Random) -> None:
    names = [f"n{number}" for number in range(8)]
    random.shuffle(names)
    renamed = dict(zip("abcdefgh", names, strict=True))
    assert copy_partners([renamed[node] for node in nodes]) == copy_partners(nodes)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), min_size=1), st.integers(0, 5), st.data())
def test_spare_processes_fit_into_a_node_beside_its_ranks(
    ranks: dict[str, int], most: int, data: st.DataObject
) -> None:
    """One is always made if any is asked for: it is what a death waits for."""
    memory = {node: data.draw(st.floats(0, 16.0)) * PROCESS_BYTES for node in ranks if data.draw(st.booleans())}
    for node, count in spare_counts(ranks, memory, most).items():
        assert min(most, 1) <= count <= most
        fits = (ranks[node] + count + 1) * PROCESS_BYTES <= memory.get(node, 0.0)
        assert count == most or not fits, "another would have had room"
        assert count <= 1 or (ranks[node] + count) * PROCESS_BYTES <= memory.get(node, 0.0)
