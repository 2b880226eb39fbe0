"""Corrupted rows: sentences in another order, spans behind one mask each; against a plain statement, row by row."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_service.rng import Key, draw_uint32, stream_key
from data_service.samples.denoising import Denoising, poisson_lengths
from data_service.samples.make import make_rows
from data_service.samples.masking import MaskingTables, purpose_key
from data_service.samples.packing import RowCuts, pack_block
from data_service.samples.samples import Samples, distribute_rows, join_rows, slice_rows
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, VOCABULARY, random_block, spec_of

SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
PACKINGS = ("full_sentences", "doc_sentences", "contiguous")
STARTS_WORD = np.random.default_rng(0).random(VOCABULARY) < 0.6
settings_of_noise = st.builds(
    Denoising,
    rate=st.floats(0.05, 0.8),
    unit=st.sampled_from(["token", "whole_word"]),
    span_mean=st.floats(1, 6),
    permute_sentences=st.booleans(),
)


def spec_with(noise: Denoising, packing: str = "full_sentences", length: int = 64) -> StreamSpec:
    return spec_of(SOURCE, length=length, masking=noise, input={"packing": packing})


def make(
    block: Block, spec: StreamSpec, key: Key, start: int = 0, stop: int | None = None
) -> tuple[RowCuts, Samples]:
    rows = pack_block(block, spec.input.packing, spec.length)  # type: ignore[arg-type]
    words = spec.masking.unit == "whole_word"
    tables = MaskingTables(STARTS_WORD if words else None)
    return rows, make_rows(block, rows, start, len(rows) if stop is None else stop, spec, key, tables)


def form(samples: Samples, row: int) -> list[int]:
    assert samples.corrupted is not None
    assert samples.corrupted_offsets is not None
    start, stop = samples.corrupted_offsets[row : row + 2]
    return samples.corrupted[start:stop].tolist()


def plainly(block: Block, rows: RowCuts, row: int, noise: Denoising, key: Key) -> list[int]:
    """The corrupted form of one row, token by token."""
    start, stop = int(rows.edges[row]), int(rows.edges[row + 1])
    names = ("sentences", "lengths", "places")
    drawn = {name: draw_uint32(purpose_key(key, name), start, stop).tolist() for name in names}
    cuts = sorted({start, stop, *(int(c) for c in (*rows.separators, *block.sentences) if start < c < stop)})
    documents: list[list[tuple[int, int]]] = []
    for sentence in pairwise(cuts):
        if not documents or sentence[0] in rows.separators:
            documents.append([])
        documents[-1].append(sentence)
    if noise.permute_sentences:
        for document in documents:
            document.sort(key=lambda sentence: drawn["sentences"][sentence[0] - start])
    texts = [[range(*sentence) for sentence in document] for document in documents]
    beads: list[list[int]] = []  # the row's units
    layout: list[list[int]] = []
    fresh = True
    for number, text in enumerate(texts):
        layout += [[SPECIAL.sep]] if number else []
        for places in text:
            for place in places:
                token = int(block.tokens[place])
                fixed = token in NEVER_MASKED
                if fixed or place == places[0] or fresh or noise.unit == "token" or STARTS_WORD[token]:
                    layout.append([])
                    beads += [] if fixed else [layout[-1]]
                layout[-1].append(token)
                fresh = fixed
    (uniform,) = draw_uint32(purpose_key(key, "budgets"), row, row + 1) / 2**32
    budget = math.floor(noise.rate * len(beads) + uniform)
    spans: list[int] = []
    lengths = poisson_lengths(noise.span_mean).from_draws(np.array(drawn["lengths"], dtype=np.uint32)) - 1
    for length in lengths.tolist():
        if sum(spans) < budget:
            spans.append(min(length, budget - sum(spans)))
    while len(spans) > sum(spans):
        spans.pop(max(at for at, length in enumerate(spans) if not length))
    string: list[int | None] = [None] * (len(beads) - sum(spans) + len(spans))
    for length, at in zip(spans, np.argsort(drawn["places"][: len(string)], kind="stable"), strict=False):
        string[at] = length
    hidden, before, passed = {}, [0] * (len(beads) + 1), 0
    for span in string:
        if span == 0:
            before[passed] += 1
        for number in range(passed, passed + (1 if span is None else span)):
            hidden[number] = None if span is None else passed
        passed += 1 if span is None else span
    out, number, covering = [SPECIAL.cls], 0, None
    for piece in layout:
        if not any(piece is bead for bead in beads):
            out += piece
            continue
        out += [SPECIAL.mask] * before[number]
        span = hidden[number]
        out += piece if span is None else [SPECIAL.mask] * (span != covering)
        covering, number = span, number + 1
    return [*out, *[SPECIAL.mask] * before[number], SPECIAL.sep]


@pytest.mark.long
@given(st.integers(0, 1000), st.integers(1, 400), st.sampled_from(PACKINGS), settings_of_noise, st.booleans())
def test_the_form_is_that_of_the_plain_statement(
    seed: int, tokens: int, packing: str, noise: Denoising, odd: bool
) -> None:
    block, key = random_block(seed=seed, tokens=tokens, sentence=6, document=3), stream_key("plain", seed)
    if odd:
        block.tokens[:: 1 + seed % 17] = SPECIAL.unk  # of the text, and never masked
    rows, samples = make(block, spec_with(noise, packing), key)
    for row in range(len(rows)):
        assert form(samples, row) == plainly(block, rows, row, noise, key)


@given(st.integers(0, 1000), st.integers(1, 900), st.sampled_from(PACKINGS), settings_of_noise)
def test_the_row_is_whole_and_every_token_of_it_is_a_target(
    seed: int, tokens: int, packing: str, noise: Denoising
) -> None:
    block = random_block(seed=seed, tokens=tokens)
    _, samples = make(block, spec_with(noise, packing), stream_key("whole", seed))
    special = np.isin(samples.tokens, NEVER_MASKED)
    np.testing.assert_array_equal(samples.tokens[~special], block.tokens)
    np.testing.assert_array_equal(samples.target_positions, np.arange(len(samples.tokens)))
    np.testing.assert_array_equal(samples.target_ids, samples.tokens)
    assert samples.causal is not None
    assert samples.causal.all()
    assert samples.corrupted_offsets is not None
    assert (np.diff(samples.corrupted_offsets) <= np.diff(samples.offsets)).all()
    assert samples.corrupted is not None
    assert (np.delete(samples.corrupted, samples.corrupted == SPECIAL.mask) != SPECIAL.mask).all()


def test_what_is_never_masked_is_kept_and_no_target() -> None:
    block = random_block(seed=4, tokens=300)
    block.tokens[::7] = SPECIAL.unk
    _, samples = make(block, spec_with(Denoising(rate=0.8)), stream_key("never"))
    assert samples.corrupted is not None
    assert (samples.corrupted == SPECIAL.unk).sum() == len(block.tokens[::7])
    assert len(samples.target_ids) == len(samples.tokens) - len(block.tokens[::7])
    assert SPECIAL.unk not in samples.target_ids


@given(st.integers(0, 100), settings_of_noise, st.data())
def test_a_row_is_the_same_alone_and_among_others(seed: int, noise: Denoising, data: st.DataObject) -> None:
    block, key, spec = random_block(seed=seed, tokens=700), stream_key("alone", seed), spec_with(noise)
    rows, whole = make(block, spec, key)
    row = data.draw(st.integers(0, len(rows) - 1))
    _, alone = make(block, spec, key, row, row + 1)
    (dealt,) = distribute_rows(join_rows([alone, whole]), [np.array([row + 1])])
    for found in (slice_rows(whole, row, row + 1), dealt):
        for name in ("tokens", "target_positions", "target_ids", "corrupted", "corrupted_offsets", "causal"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))


def gaps(samples: Samples, first: int) -> NDArray[np.int64]:
    """How many units lie behind each mask, where every token of the text is its own number from `first` on and
    sentences are in order. Neighbouring masks share theirs, so such are left out."""
    assert samples.corrupted is not None
    tokens = samples.corrupted.astype(np.int64)
    at = np.flatnonzero(tokens[1:-1] == SPECIAL.mask) + 1
    alone = at[(tokens[at - 1] >= first) & (tokens[at + 1] >= first)]
    return tokens[alone + 1] - tokens[alone - 1] - 1


@pytest.fixture(scope="module")
def long_rows() -> list[Samples]:
    """300 rows of 1,000 different tokens, at the published settings, sentences in order."""
    block = Block(np.arange(5, 1005).astype(np.uint16), np.array([0, 1000]), np.array([0, 1]))
    spec = spec_of(
        SOURCE,
        length=1002,
        vocab_size=1005,
        masking=Denoising(permute_sentences=False),
        input={"packing": "full_sentences"},
    )
    return [make(block, spec, stream_key("long", seed))[1] for seed in range(300)]


def test_spans_have_poisson_lengths_of_mean_3(long_rows: list[Samples]) -> None:
    """Each share within five standard deviations. A span that has a neighbour is not seen, whatever its length."""
    found = np.concatenate([gaps(samples, 5) for samples in long_rows])
    assert len(found) > 20_000
    for length in range(8):
        share = math.exp(-3) * 3**length / math.factorial(length)
        deviation = math.sqrt(share * (1 - share) / len(found))
        assert (
            abs((found == length).mean() - share) < 5 * deviation + 0.002
        )  # 300 spans of a row's end are cut


def test_three_tenths_are_hidden_evenly(long_rows: list[Samples]) -> None:
    hidden = np.array([~np.isin(np.arange(5, 1005), form(samples, 0)) for samples in long_rows])
    np.testing.assert_array_equal(hidden.sum(1), 300)
    shares = hidden.reshape(300, 20, 50).mean((0, 2))  # by place in the row
    assert np.abs(shares - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 * 3.3 / 15_000)


@pytest.mark.long
@pytest.mark.parametrize(("sentences", "orders"), [(2, 2), (3, 6)])
def test_every_order_of_sentences_is_as_likely(sentences: int, orders: int) -> None:
    block = Block(
        np.arange(5, 5 + sentences).astype(np.uint16), np.arange(sentences + 1), np.array([0, sentences])
    )
    spec = spec_with(Denoising(rate=0.01, unit="token"))
    found = [tuple(form(make(block, spec, stream_key("order", seed))[1], 0)) for seed in range(1200)]
    whole = [order for order in found if SPECIAL.mask not in order]
    counts = np.unique(whole, axis=0, return_counts=True)[1]
    assert len(counts) == orders
    assert ((counts - len(whole) / orders) ** 2).sum() / (len(whole) / orders) < 22  # chi-squared, at 0.0005


def test_documents_of_a_row_keep_their_places() -> None:
    block = random_block(seed=5, tokens=600, sentence=4, document=3)
    _, samples = make(block, spec_with(Denoising(rate=0.01)), stream_key("documents"))
    assert samples.corrupted is not None
    unmasked = [row for row in range(samples.rows) if SPECIAL.mask not in form(samples, row)]
    assert unmasked
    for row in unmasked:
        original = samples.tokens[samples.offsets[row] : samples.offsets[row + 1]]
        changed = np.array(form(samples, row))
        np.testing.assert_array_equal(changed == SPECIAL.sep, original == SPECIAL.sep)
        ends = np.flatnonzero(original == SPECIAL.sep)
        for start, stop in pairwise([0, *ends.tolist()]):
            assert sorted(changed[start:stop]) == sorted(original[start:stop])
