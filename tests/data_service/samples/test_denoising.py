"""Corrupted rows: sentences in another order, spans behind one mask each; against a plain statement, row by row."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import Key, draw_uint32, stream_key
from data_service.samples.denoising import Denoising, poisson_lengths
from data_service.samples.masking import purpose_key
from data_service.samples.packing import RowCuts
from data_service.samples.samples import Samples
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, random_block
from tests.support.data.row_settings import PACKED, WORD_STARTS, packed_rows

settings_of_noise = st.builds(
    Denoising,
    rate=st.floats(0.05, 0.8),
    unit=st.sampled_from(["token", "whole_word"]),
    span_mean=st.floats(1, 6),
    permute_sentences=st.booleans(),
)


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
                if fixed or place == places[0] or fresh or noise.unit == "token" or WORD_STARTS[token]:
                    layout.append([])
                    beads += [] if fixed else [layout[-1]]
                layout[-1].append(token)
                fresh = fixed
    (uniform,) = draw_uint32(purpose_key(key, "budgets"), row, row + 1) / 2**32
    budget = math.floor(noise.rate * len(beads) + uniform)
    spans: list[int] = []
    lengths = poisson_lengths(noise.span_mean).lengths_from_draws(np.array(drawn["lengths"], dtype=np.uint32)) - 1
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


@given(st.integers(0, 1000), st.integers(1, 400), st.sampled_from(PACKED), settings_of_noise, st.booleans())
def test_the_form_is_that_of_the_plain_statement(
    seed: int, tokens: int, packing: str, noise: Denoising, odd: bool
) -> None:
    block, key = random_block(seed=seed, tokens=tokens, sentence=6, document=3), stream_key("plain", seed)
    if odd:
        block.tokens[:: 1 + seed % 17] = SPECIAL.unk  # of the text, and never masked
    rows, samples = packed_rows(block, noise, packing, key=key)
    for row in range(len(rows)):
        assert form(samples, row) == plainly(block, rows, row, noise, key)
    targets = np.flatnonzero(samples.tokens != SPECIAL.unk)
    np.testing.assert_array_equal(samples.target_positions, targets)
    np.testing.assert_array_equal(samples.target_ids, samples.tokens[targets])
    assert samples.causal is not None
    assert samples.causal.all()
    assert samples.corrupted_offsets is not None
    assert (np.diff(samples.corrupted_offsets) <= np.diff(samples.offsets)).all()


def test_spans_have_poisson_lengths() -> None:
    """Of mean 3 as published, each share within five standard deviations."""
    lengths = poisson_lengths(3.0).lengths_from_draws(draw_uint32(stream_key("lengths"), 0, 1_000_000)) - 1
    counts = np.bincount(lengths, minlength=12)
    for length in range(12):
        share = math.exp(-3) * 3**length / math.factorial(length)
        assert abs(counts[length] - share * 1e6) < 5 * math.sqrt(1e6 * share * (1 - share))
