"""Lanes from a real corpus: steps continue each other, whatever is read in which order, and whole steps fill epochs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.corpus.manifest import block_table
from data_service.errors import PlanError
from data_service.ingest.build import build_corpus
from data_service.samples.samples import Samples, join_rows
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.stream.order import LaneOrder
from data_service.stream.plan import StreamPlan
from data_service.stream.positions import PhaseBatches, Positions
from data_service.stream.stream import Stream
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from tests.support.data.corpora import spec_of
from tests.support.data.raw_text import DOCUMENTS, SMALL, ignore_progress, write_jsonl

REUSE, LENGTH, LANES = 16, 45, 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("unigram", iter(DOCUMENTS[:10]), 500, TokenizerOptions(specials="xlnet"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[SourceSpec, SourceSpec]:
    folder = tmp_path_factory.mktemp("corpora")
    save_tokenizer(tokenizer, str(folder / "tokenizer"))
    found = []
    for name, documents in (("large", DOCUMENTS[:24]), ("small", DOCUMENTS[30:38])):
        text, uri = write_jsonl(folder / f"{name}.jsonl", documents), str(folder / name)
        manifest = build_corpus([str(text)], uri, str(folder / "tokenizer"), SMALL, ignore_progress)
        found.append(SourceSpec(name=name, uri=uri, manifest_fingerprint=manifest.fingerprint))
    return found[0], found[1]


def lanes_spec(tokenizer: Tokenizer, *sources: SourceSpec, **settings: object) -> StreamSpec:
    return spec_of(
        *sources,
        **{
            "input": {"packing": "lanes", "reuse": REUSE},
            "masking": {"kind": "plm", "predict": 7},
            "length": LENGTH,
            "lanes": LANES,
            "special": tokenizer.special,
            "never_masked": tuple(np.flatnonzero(tokenizer.special_mask).tolist()),
            "vocab_size": tokenizer.vocab_size,
            "window": {"samples": 10 * LANES, "least_tokens": 1},
            **settings,
        },
    )


def reused(samples: Samples) -> np.ndarray:
    return samples.tokens.reshape(-1, LENGTH)[:, :REUSE]


@pytest.mark.long
def test_each_lane_of_a_step_continues_itself(
    tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]
) -> None:
    """Inside a window and a block the next row begins where this one's reused part ends, in its own direction."""
    stream = Stream(lanes_spec(tokenizer, sources[0]))
    positions = Positions([PhaseBatches.from_samples(40, LANES, stream.samples_per_epoch)])
    continued = 0
    for step, following in pairwise(range(40)):
        (now,), (then,) = positions.ranges(step), positions.ranges(following)
        assert now.start % LANES == then.start % LANES == 0
        grid = stream.plan.epoch_layout
        same_window = now.epoch == then.epoch and grid.window_with_sample(
            now.start
        ) == grid.window_with_sample(then.start)
        rows, coming = (stream.read(r.epoch, r.start, r.stop) for r in (now, then))
        assert rows.reversed_rows is not None
        assert rows.reversed_rows.tolist() == [False, True] * (LANES // 2)
        for lane in range(LANES):
            one, two = (stream.plan.origin(r.epoch, r.start + lane) for r in (now, then))
            if same_window and (one.block, one.epoch) == (two.block, two.epoch):
                continued += 1
                # The row's text after its reused part begins A, and is the next row's reused part.
                assert rows.segment_starts is not None
                size = min(REUSE, int(rows.segment_starts[lane]) - 1 - REUSE)
                here = rows.tokens.reshape(-1, LENGTH)[lane, REUSE : REUSE + size]
                np.testing.assert_array_equal(reused(coming)[lane, :size], here)
                assert two.row - one.row == (-2 if lane % 2 else 2)
    assert continued > 0.7 * 39 * LANES


@pytest.mark.long
def test_every_row_once_an_epoch_in_whole_steps(
    tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]
) -> None:
    stream = Stream(lanes_spec(tokenizer, sources[0]))
    count = stream.samples_per_epoch
    origins = [stream.plan.origin(0, sample) for sample in range(count)]
    assert len({(o.block, o.row) for o in origins}) == count
    every = Stream(lanes_spec(tokenizer, sources[0], lanes=None)).samples_per_epoch
    assert every - LANES < count <= every
    assert count % LANES == 0


@pytest.mark.long
def test_any_cut_and_any_order_of_reading_gives_the_same_bytes(
    tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]
) -> None:
    spec = lanes_spec(tokenizer, *sources)
    count = Stream(spec).samples_per_epoch
    whole = Stream(spec).read(1, 0, count)
    rng = np.random.default_rng(0)
    ranges = list(pairwise(np.unique([0, count, *rng.integers(0, count, 20)]).tolist()))
    fresh = Stream(spec, windows=1)
    parts = {index: fresh.read(1, *ranges[index]) for index in rng.permutation(len(ranges)).tolist()}
    joined = join_rows([parts[index] for index in range(len(ranges))])
    absent = {"restarts", "languages", "pair_label", "text_starts", "cls_last", "holes", "rates", "maskable"}
    absent |= {"causal", "corrupted", "corrupted_offsets"}
    for column in vars(whole):
        ours, theirs = getattr(joined, column), getattr(whole, column)
        assert (ours is None) == (theirs is None) == (column in absent)
        np.testing.assert_array_equal(ours, theirs, err_msg=column)


@pytest.mark.long
def test_a_mixture_by_weight_goes_on_from_epoch_to_epoch(
    tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]
) -> None:
    weighted = [s.model_copy(update={"weight": w}) for s, w in zip(sources, (1.0, 3.0), strict=True)]
    stream = Stream(lanes_spec(tokenizer, *weighted))
    large, small = stream.plan.epoch_layout.quotas
    assert large % LANES == small % LANES == 0
    assert abs(small - 3 * large) <= 4 * LANES
    for epoch in (0, 1):
        samples = stream.read(epoch, 0, stream.samples_per_epoch)
        assert samples.order is not None
        assert len(samples.target_ids) == 7 * samples.rows
        for window in range(stream.plan.epoch_layout.windows):
            assert stream.plan.epoch_layout.size(window) % LANES == 0


@pytest.mark.long
def test_the_text_of_a_sample_is_found(tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]) -> None:
    input_ = {"packing": "lanes", "reuse": REUSE, "random": 0}
    stream = Stream(lanes_spec(tokenizer, sources[0], input=input_))
    for sample in range(0, stream.samples_per_epoch, 101):
        row = stream.read(0, sample, sample + 1)
        text = row.tokens[~tokenizer.special_mask[row.tokens]]
        assert row.reversed_rows is not None
        found = stream.source(0, sample).tokens
        found = found[~tokenizer.special_mask[found]]
        np.testing.assert_array_equal(text[::-1] if row.reversed_rows[0] else text, found)


@pytest.mark.long
def test_documents_end_with_their_token(tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]) -> None:
    assert tokenizer.special.eod == tokenizer.pieces.index("<eod>")
    stream = Stream(lanes_spec(tokenizer, sources[0]))
    samples = stream.read(0, 0, stream.samples_per_epoch)
    assert (samples.tokens == tokenizer.special.eod).any()
    assert (samples.tokens == tokenizer.special.sep).sum() == 2 * samples.rows
    assert not (samples.target_ids == tokenizer.special.eod).any()


def test_too_little_text_is_refused(tokenizer: Tokenizer, sources: tuple[SourceSpec, SourceSpec]) -> None:
    with pytest.raises(PlanError, match=r"\blarge \(.*\b100000 lanes\b"):
        Stream(lanes_spec(tokenizer, sources[0], lanes=100_000))
    with pytest.raises(PlanError, match=r"\blarge \(.*\b60000 tokens\b.*\btrain\b"):
        Stream(lanes_spec(tokenizer, sources[0], length=60_000))
    thin = [s.model_copy(update={"weight": w}) for s, w in zip(sources, (1e6, 1.0), strict=True)]
    with pytest.raises(PlanError, match=r"\bsmall \(.*\blanes\b"):
        Stream(lanes_spec(tokenizer, *thin))


def test_lanes_and_permuted_prediction_go_together(tokenizer: Tokenizer) -> None:
    source = SourceSpec(name="x", uri="x", manifest_fingerprint="x")
    for settings in ({"masking": {"kind": "mlm"}}, {"input": {"packing": "contiguous"}}):
        with pytest.raises(ValueError, match=r"\bplm\b.*\blanes\b"):
            lanes_spec(tokenizer, source, **settings)
    with pytest.raises(ValueError, match=r"\bplm\b.*\blanes\b"):
        spec_of(source, lanes=4)
    with pytest.raises(PlanError, match=r"\b5 lanes\b"):
        lanes_spec(tokenizer, source, lanes=5)


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, 2]))
def test_lane_order_is_a_permutation_in_which_lanes_go_on(pairs: int, steps: int, directions: int) -> None:
    lanes = pairs * directions
    order = LaneOrder(lanes * steps, lanes, directions)
    rows = order.at_many(np.arange(lanes * steps)).reshape(steps, lanes)
    assert sorted(rows.ravel().tolist()) == list(range(lanes * steps))
    for lane in range(lanes):
        direction = lane % directions
        assert (rows[:, lane] % directions == direction).all()
        assert (np.diff(rows[:, lane] // directions) == (-1 if direction else 1)).all()
    assert rows[-1, -1] == order.at(lanes * steps - 1)
    with pytest.raises(IndexError):
        order.at(lanes * steps)


@pytest.mark.long
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_windows_of_a_plan_are_whole_steps_of_every_source(
    windows_of_text: list[list[int]], pairs: int, epoch: int
) -> None:
    lanes = 2 * pairs
    counts = tuple(2 * np.array([*blocks, lanes]) for blocks in windows_of_text)
    tables = tuple(
        block_table([(0, 0, 0, 10 * n, n, 1) for n in rows.tolist()], ["0" * 32] * len(rows), ["shard"])
        for rows in counts
    )
    named = [SourceSpec(name=f"s{i}", uri=f"u{i}", manifest_fingerprint=f"f{i}") for i in range(len(counts))]
    spec = spec_of(
        *named,
        input={"packing": "lanes", "reuse": 4},
        masking={"kind": "plm", "predict": 2},
        lanes=lanes,
        window={"samples": 3 * lanes, "least_tokens": 1},
    )
    plan = StreamPlan(spec, tables, counts)
    assert plan.epoch_layout.samples_per_epoch % lanes == 0
    for window in range(plan.epoch_layout.windows):
        made = plan.window(epoch, window)
        assert made.order.size == plan.epoch_layout.size(window) == sum(map(len, made.pieces))
        per_source = [sum(len(p) for p in made.pieces if p.source == s) for s in range(len(counts))]
        assert all(size % lanes == 0 for size in per_source)
        assert all(
            p.start % 2 == p.stop % 2 == 0 for p in made.pieces
        )  # both directions of a window together
