"""Phases that read on: each source's text once before any of it comes again, in the shares that the weights say, and
every phase found without those before it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_service.corpus.manifest import make_block_table
from data_service.errors import PlanError
from data_service.samples.make import cut_block, cutting_key, token_ranges_of_row
from data_service.samples.spec import SourceSpec, Stage, StreamSpec
from data_service.stream.plan import SourceRowSequence, StreamPlan
from data_service.stream.stages import StageInputs, last_stage_rows, row_starts, stage_weights
from data_service.stream.token_axis import TokenAxis, measure_lines
from tests.support.data.corpora import random_block, rows_of_epoch, spec_of
from tests.support.data.row_settings import NOWHERE

LENGTHS = (8, 12, 32)
Reading = tuple[int, int, int]  # of a piece of text: (reading, first token in the line of that reading, its end)


@lru_cache(1000)
def random_row_starts(tokens: int, length: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    steps = np.random.default_rng(seed).integers(1, length + 1, tokens)
    begins = np.append(0, np.cumsum(steps))
    return begins[begins < tokens]


@dataclass(frozen=True)
class MadeUp:
    """Sources of blocks of so many tokens, cut into rows at random places."""

    blocks: tuple[tuple[int, ...], ...]
    seed: int

    def starts(self, length: int, source: int, block: int, reading: int) -> NDArray[np.int64]:
        """Where rows begin, each at most `length` tokens behind the last; other places for each length."""
        return random_row_starts(self.blocks[source][block], length, (self.seed, length, source, block))

    def lengths(self, length: int, source: int) -> NDArray[np.uint32]:
        found = [
            np.diff(np.append(self.starts(length, source, block, 0), tokens))
            for block, tokens in enumerate(self.blocks[source])
        ]
        return np.concatenate(found).astype(np.uint32)

    def counts(self, length: int) -> tuple[NDArray[np.int64], ...]:
        return tuple(
            np.array([len(self.starts(length, source, block, 0)) for block in range(len(blocks))])
            for source, blocks in enumerate(self.blocks)
        )

    @cached_property
    def sources(self) -> tuple[SourceSpec, ...]:
        names = range(len(self.blocks))
        return tuple(SourceSpec(name=f"s{i}", uri=f"u{i}", manifest_fingerprint=f"f{i}") for i in names)

    def spec(self, stages: Sequence[Stage]) -> StreamSpec:
        window = {"samples": 9, "least_tokens": 1, "stretches": 4}
        return spec_of(*self.sources, length=stages[-1].length, stages=tuple(stages), window=window)

    @cached_property
    def rows(self) -> StageInputs:
        spec = spec_of(*self.sources)

        def lines(length: int) -> list[SourceRowSequence]:
            return [SourceRowSequence(spec, source, rows) for source, rows in enumerate(self.counts(length))]

        return StageInputs(
            tuple(map(sum, self.blocks)),
            lines,
            lambda length: measure_lines(spec, lines(length), self.counts(length), self.measured(length)),
            self.starts,
        )

    def measured(self, length: int) -> tuple[NDArray[np.uint32], ...]:
        return tuple(self.lengths(length, source) for source in range(len(self.blocks)))

    def plan(self, stages: Sequence[Stage]) -> StreamPlan:
        """Of the last stage."""
        spec = self.spec(stages)
        tables = tuple(
            make_block_table([(0, 0, 0, n, 1, 1) for n in blocks], ["0" * 32] * len(blocks), ["shard"])
            for blocks in self.blocks
        )
        return StreamPlan(spec, tables, self.counts(spec.length), last_stage_rows(spec, self.rows))

    def text_of(self, plan: StreamPlan, rows: Sequence[tuple[int, int, int, int]]) -> list[list[Reading]]:
        """By source, the text behind rows (source, block, row, reading), in the order of its line."""
        found: list[list[Reading]] = [[] for _ in self.blocks]
        for source, block, row, reading in rows:
            order = plan.lines[source].shuffled_blocks(reading).blocks.tolist()
            base = sum(self.blocks[source][other] for other in order[: order.index(block)])
            edges = [
                *self.starts(plan.spec.length, source, block, reading).tolist(),
                self.blocks[source][block],
            ]
            found[source].append((reading, base + edges[row], base + edges[row + 1]))
        return [sorted(texts) for texts in found]


def tokens_of(texts: list[Reading]) -> int:
    return sum(stop - start for _, start, stop in texts)


made_up = st.builds(
    MadeUp,
    st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple),
    st.integers(0, 999),
)


@st.composite
def staged(draw: st.DrawFn) -> tuple[MadeUp, list[Stage]]:
    corpora = draw(made_up)
    count = len(corpora.blocks)
    numbers = st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=count, max_size=count).filter(any)
    by_size = st.lists(st.sampled_from([None, 0.0, 0.3]), min_size=count, max_size=count).filter(
        lambda given: None in given
    )
    stages = []
    for phase in range(draw(st.integers(1, 4))):
        in_tokens = draw(st.booleans())
        weights: tuple[float | None, ...] = tuple(draw(st.one_of(st.just([]), numbers, by_size)))
        mixed = not weights or None in weights
        stages.append(
            Stage(
                phase=phase,
                length=draw(st.sampled_from(LENGTHS)),
                units=draw(st.integers(300, 900) if in_tokens else st.integers(20, 90)),
                in_tokens=in_tokens,
                weights=weights,
                temperature=draw(st.sampled_from([None, 1.4, 3.0])) if mixed else None,
            )
        )
    return corpora, stages


def plans_of(corpora: MadeUp, stages: list[Stage]) -> list[StreamPlan]:
    """Each found alone."""
    try:
        return [corpora.plan(stages[: number + 1]) for number in range(len(stages))]
    except PlanError:  # a share of less than a row
        reject()


@settings(deadline=None)
@given(staged())
def test_text_comes_once_before_it_comes_again_across_phases_too(given: tuple[MadeUp, list[Stage]]) -> None:
    """A phase's text of a source begins where the last one's ended: to the token if rows are as long, else less than a
    row behind."""
    corpora, stages = given
    reached: dict[int, Reading] = {}
    lengths: dict[int, int] = {}
    for plan in plans_of(corpora, stages):
        for source, texts in enumerate(corpora.text_of(plan, rows_of_epoch(plan, 0))):
            whole = sum(corpora.blocks[source])
            before = reached.get(source, (0, 0, 0))
            for (reading, _, stop), (other, start, _) in pairwise([before, *texts]):
                gap = (other * whole + start) - (reading * whole + stop)
                recut = (other, start) == texts[0][:2] and plan.spec.length != lengths.get(source, plan.spec.length)
                assert 0 <= gap < (plan.spec.length if recut else 1)
            if texts:
                reached[source], lengths[source] = texts[-1], plan.spec.length


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(staged())
def test_shares_are_of_tokens(given: tuple[MadeUp, list[Stage]]) -> None:
    """Of samples: as far as a stretch of a source has the average rows of the source. Of tokens: to less than a row."""
    corpora, stages = given
    for plan, stage in zip(plans_of(corpora, stages), stages, strict=True):
        weights = stage_weights(plan.spec, stage, corpora.rows.text)
        taken = [tokens_of(texts) for texts in corpora.text_of(plan, rows_of_epoch(plan, 0))]
        if stage.in_tokens:
            for got, weight in zip(taken, weights, strict=True):
                assert -1 < got - weight * stage.units < stage.length + 1
            continue
        assert sum(plan.epoch_layout.quotas) == stage.units
        means = [size / line.rows_per_round for size, line in zip(corpora.rows.text, plan.lines, strict=True)]
        total = stage.units / sum(weight / mean for weight, mean in zip(weights, means, strict=True))
        for source, quota in enumerate(plan.epoch_layout.quotas):
            assert abs(quota * means[source] - weights[source] * total) <= means[source]
            tokens = corpora.rows.line_tokens_at_length(stage.length)[source]
            stop = plan.begins[source] + quota  # in a later reading, which has the blocks in another order
            uneven = max(abs(tokens.tokens_before(row) - row * means[source]) for row in range(stop + 1))
            assert abs(taken[source] - weights[source] * total) <= means[source] + 2 * uneven + 1e-6


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(staged(), st.data())
def test_any_sample_is_found_alone_and_phases_are_not_changed_by_what_follows(
    given: tuple[MadeUp, list[Stage]], data: st.DataObject
) -> None:
    corpora, stages = given
    plan = plans_of(corpora, stages)[-1]
    rows = rows_of_epoch(plan, 0)
    sample = data.draw(st.integers(0, len(rows) - 1))
    found = corpora.plan(stages).origin_of_sample(0, sample)
    assert (found.source, found.block, found.row, found.epoch) == rows[sample]
    longer = stages[-1].model_copy(update={"epochs": 3})
    assert rows_of_epoch(corpora.plan([*stages[:-1], longer]), 0) == rows
    following = corpora.plan([*stages[:-1], longer, stages[-1].model_copy(update={"phase": 9})])
    assert following.begins == tuple(
        begin + 3 * quota for begin, quota in zip(plan.begins, plan.epoch_layout.quotas, strict=True)
    )


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(staged())
def test_an_axis_of_tokens_begins_where_the_stage_does(given: tuple[MadeUp, list[Stage]]) -> None:
    corpora, stages = given
    for plan, stage in zip(plans_of(corpora, stages), stages, strict=True):
        axis = TokenAxis(plan, corpora.counts(stage.length), corpora.measured(stage.length))
        assert axis.unit_of_sample(0, 0) == 0
        assert axis.sample_at_unit(0) == (0, 0)
        taken = [tokens_of(texts) for texts in corpora.text_of(plan, rows_of_epoch(plan, 0))]
        assert axis.unit_of_sample(1, 0) == sum(taken)
        if stage.in_tokens:
            assert stage.units <= sum(taken) < stage.units + len(taken) * stage.length


CORPORA = MadeUp(((100, 60, 90), (40, 50)), 1)
STAGE = Stage(phase=0, length=8, units=400, in_tokens=True)


def test_a_source_is_read_as_often_as_it_may_and_no_more() -> None:
    """The remedy is one: with the weight and with the limit that it names the plan stands."""
    first = STAGE.model_copy(update={"weights": (0.5, 0.5), "most_readings": 3.0})
    second = first.model_copy(update={"phase": 1, "weights": (0.6, 0.4), "most_readings": 3.0})
    with pytest.raises(PlanError, match=r"s1 \(u1\).*\b90 tokens\b.*\b4\.\d\d times\b") as caught:
        last_stage_rows(CORPORA.spec([first, second]), CORPORA.rows)
    assert re.search(r"\bphase 1\b.*\bmost_readings\W+3\b", caught.value.problem)
    remedy = caught.value.remedy
    share = float(remedy.split("at most ")[1].split(" %")[0]) / 100
    limit = float(remedy.split("most_readings to ")[1].split()[0])
    assert 0.1 < share < 0.4
    for changed in ({"weights": (1 - share + 0.02, share - 0.02)}, {"most_readings": limit}):
        last_stage_rows(CORPORA.spec([first, second.model_copy(update=changed)]), CORPORA.rows)
    with pytest.raises(PlanError):
        last_stage_rows(CORPORA.spec([first, second.model_copy(update={"weights": (0.5, 0.5)})]), CORPORA.rows)


def test_a_source_that_has_been_read_enough_can_only_be_left_out() -> None:
    first = STAGE.model_copy(update={"weights": (0.0, 1.0)})
    second = STAGE.model_copy(update={"phase": 1, "weights": (0.9, 0.1), "most_readings": 4.0})
    with pytest.raises(PlanError) as caught:
        last_stage_rows(CORPORA.spec([first, second]), CORPORA.rows)
    assert " phase" in caught.value.remedy
    left_out = second.model_copy(update={"weights": (1.0, 0.0), "most_readings": 4.0})
    last_stage_rows(CORPORA.spec([first, left_out]), CORPORA.rows)


def test_a_share_of_less_than_a_row_is_refused() -> None:
    few = Stage(phase=2, length=8, units=20, weights=(1.0, 0.001))
    with pytest.raises(PlanError, match=r"\bphase 2\b.*\b20 rows\b"):
        last_stage_rows(CORPORA.spec([few]), CORPORA.rows)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"weights": (0.6, None, 0.4)}, "None"),
        ({"weights": (1.0, 1.0), "temperature": 2}, "temperature"),
    ],
)
def test_a_stage_that_leaves_nothing_to_sources_by_size_is_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Stage.model_validate({"phase": 0, "length": 8, "units": 9, **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"length": 12}, "the stream.s length"),
        ({"stages": (STAGE.model_copy(update={"weights": (1.0,)}),)}, "a weight for each source"),
        ({"one_source": 4}, "independent of each other"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        spec_of(*CORPORA.sources, **{"length": 8, "stages": (STAGE,), **settings})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lone", ["cut", "random"])
def test_a_row_of_swapped_segments_begins_with_the_earlier_one(seed: int, lone: str) -> None:
    """So rows of another length that begin at the same token or behind it hold no text that was read."""
    block = random_block(seed, 3000)
    for length in (24, 64):
        spec = spec_of(NOWHERE, length=length, input={"packing": "ordered_pair", "lone_sentence": lone})
        key = cutting_key(spec, 0, 0, 0)
        rows = cut_block(block, spec, key)
        starts = row_starts(block, rows, spec).tolist()
        assert starts == sorted(set(starts))
        swapped = 0
        for row, (start, stop) in enumerate(pairwise([*starts, len(block.tokens)])):
            both = token_ranges_of_row(block, rows, row, spec, key)
            whole = range(min(part.start for part in both), max(part.stop for part in both))
            if lone == "cut":
                assert whole == range(start, stop)
            elif whole.start != start or whole.stop > stop:  # with a random segment, and the first may be shortened
                whole = both[0]
            assert start == whole.start < whole.stop <= stop
            swapped += both[0].start > start
        assert swapped > len(starts) / 10


def test_rows_of_several_texts_are_measured_to_their_whole_length() -> None:
    """A row of nine texts may hold more tokens than 16 bits can count."""
    spec = spec_of(NOWHERE, length=8192, input={"packing": "pairs", "negatives": 7}, masking={"kind": "none"})
    counts, lengths = (np.array([2]),), (np.array([spec.row_length, 100], dtype=np.uint32),)
    (line,) = measure_lines(spec, [SourceRowSequence(spec, 0, counts[0])], counts, lengths)
    assert [line.tokens_before(row) for row in range(3)] == [0, 9 * 8192, 9 * 8192 + 100]
