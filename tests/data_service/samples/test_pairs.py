"""Rows of two segments against the published constructions, written out sentence by sentence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.rng import Key, stream_key
from data_service.samples import sentence_chunks as chunks
from data_service.samples.packing import Segments
from data_service.samples.pairs import OrderedPairs, SegmentPairs, SentencePairs, TwoSegments
from data_service.types import Block
from tests.support.data.corpora import random_block

Tokens = list[int]
"""Where tokens lie in the block: consecutive numbers."""

blocks = st.builds(
    random_block,
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 400),
    sentence=st.floats(1, 30),
    document=st.floats(1, 12),
)
keys = st.integers(0, 10**6).map(stream_key)
lengths = st.integers(8, 60)
shares = st.sampled_from([0.0, 0.1, 0.5, 1.0])


@dataclass(frozen=True)
class Pair:
    """A row before it is cut to size."""

    a: Tokens
    b: Tokens
    label: int | None


class Draws:
    """The draws that the construction uses, asked for one at a time."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def below(self, purpose: str, number: int, bound: int) -> int:
        return int(chunks.draw_integers_below(self.key, purpose, np.array([number]), bound)[0])

    def happens(self, purpose: str, number: int, share: float) -> bool:
        return bool(chunks.draw_bernoulli(self.key, purpose, np.array([number]), share)[0])


def documents_of(block: Block, longest: int | None = None) -> list[list[Tokens]]:
    """Documents as lists of sentences; sentences over `longest` in pieces."""
    step = longest or max(1, len(block.tokens))
    return [
        [
            list(range(begin, min(begin + step, int(block.sentences[j + 1]))))
            for j in range(block.documents[k], block.documents[k + 1])
            for begin in range(int(block.sentences[j]), int(block.sentences[j + 1]), step)
        ]
        for k in range(len(block.documents) - 1)
    ]


def flat(sentences: list[Tokens]) -> Tokens:
    return [token for sentence in sentences for token in sentence]


def random_text(draws: Draws, documents: list[list[Tokens]], own: int, number: int, tokens: int) -> Tokens:
    """From a random sentence of a random other document on, until there are `tokens`."""
    others = [k for k in range(len(documents)) if k != own] or [own]
    document = documents[others[draws.below("other document", number, len(others))]]
    text: Tokens = []
    for sentence in document[draws.below("other sentence", number, len(document)) :]:
        text += sentence
        if len(text) >= tokens:
            break
    return text


def document_target(draws: Draws, document: int, room: int, short: float) -> int:
    if draws.happens("short document", document, short):
        return 2 + draws.below("short target", document, room - 1)
    return room


def literal_segment_pairs(block: Block, config: SegmentPairs, length: int, key: Key) -> Iterator[Pair]:
    draws, documents, number = Draws(key), documents_of(block), 0
    for own, document in enumerate(documents):
        first, i, chunk = number, 0, []
        target = document_target(draws, own, length - 3, config.short)
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or len(flat(chunk)) >= target:
                at = first + i + 1 - len(chunk)
                a_end = 1
                if len(chunk) >= 2:
                    a_end = 1 + draws.below("split", at, len(chunk) - 1)
                a = flat(chunk[:a_end])
                if len(chunk) == 1 or draws.happens("random", at, config.random):
                    yield Pair(a, random_text(draws, documents, own, at, target - len(a)), 1)
                    i -= len(chunk) - a_end
                else:
                    yield Pair(a, flat(chunk[a_end:]), 0)
                chunk = []
            i += 1
        number += len(document)


def literal_sentence_pairs(block: Block, config: SentencePairs, length: int, key: Key) -> Iterator[Pair]:
    draws, documents, number = Draws(key), documents_of(block), 0
    for own, document in enumerate(documents):
        i = 0
        while i < len(document):
            at = number + i
            if i == len(document) - 1 or draws.happens("random", at, config.random):
                yield Pair(document[i], random_text(draws, documents, own, at, 1), 1)
                i += 1
            else:
                yield Pair(document[i], document[i + 1], 0)
                i += 2
        number += len(document)


def chunks_of(document: list[Tokens], target: Callable[[int], int], room: Callable[[int], int]) -> Iterator[range]:
    """Sentences while they are fewer than the target and the next one fits; both may depend on the first."""
    first = 0
    while first < len(document):
        stop = first + 1
        while (
            stop < len(document)
            and len(flat(document[first:stop])) < target(first)
            and len(flat(document[first : stop + 1])) <= room(first)
        ):
            stop += 1
        yield range(first, stop)
        first = stop


def literal_ordered_pairs(block: Block, config: OrderedPairs, length: int, key: Key) -> Iterator[Pair]:
    room = length - 3
    draws, documents, number = Draws(key), documents_of(block, room), 0
    for own, document in enumerate(documents):
        target = document_target(draws, own, room, config.short)
        for chunk in chunks_of(document, lambda _: target, lambda _: room):  # noqa: B023 - used at once
            at, text = number + chunk.start, flat(document[chunk.start : chunk.stop])
            if len(chunk) > 1:
                split = 1 + draws.below("split", at, len(chunk) - 1)
                middle = len(flat(document[chunk.start : chunk.start + split]))
            elif config.lone_sentence == "random":
                yield Pair(text, random_text(draws, documents, own, at, target - len(text)), 1)
                continue
            elif len(text) == 1:
                yield Pair(text, [], 0)
                continue
            else:
                middle = 1 + draws.below("split", at, len(text) - 1)
            if draws.happens("swapped", at, config.swapped):
                yield Pair(text[middle:], text[:middle], 1)
            else:
                yield Pair(text[:middle], text[middle:], 0)
        number += len(document)


def literal_two_segments(block: Block, config: TwoSegments, length: int, key: Key) -> Iterator[Pair]:
    draws, number = Draws(key), 0
    for document in documents_of(block, length - 3):

        def target(i: int, base: int = number) -> int:
            short = draws.happens("short", base + i, config.short)
            return 5 + draws.below("short target", base + i, length - 4) if short else length

        def single(i: int, base: int = number) -> bool:
            return draws.happens("single", base + i, config.single)

        for chunk in chunks_of(document, target, lambda i: length - 2 if single(i) else length - 3):
            half = 100_000 if single(chunk.start) else (target(chunk.start) - 3) // 2
            a: Tokens = []
            b: Tokens = []
            for i in chunk:
                fits = len(a) + len(document[i]) < half
                coin = len(a) < half and draws.happens("over half", number + chunk.start, 0.5)
                if not a or (not b and (fits or coin)):
                    a += document[i]
                else:
                    b += document[i]
            yield Pair(a, b, None)
        number += len(document)


def cut_sizes(pair: Pair, room: int) -> tuple[int, int]:
    """The official loop: a token at a time from the longer segment, from the second if they are equal."""
    a, b = len(pair.a), len(pair.b)
    while a + b > room:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


def assert_rows(segments: Segments, literal: Iterator[Pair], length: int) -> None:
    expected = list(literal)
    assert len(segments.starts) == len(expected)
    for row, pair in enumerate(expected):
        room = length - (3 if pair.b else 2)
        assert tuple(segments.sizes[row]) == cut_sizes(pair, room)
        for text, start, size in zip((pair.a, pair.b), segments.starts[row], segments.sizes[row], strict=True):
            if text:
                assert text[0] <= start
                assert start + size <= text[-1] + 1
        if pair.label is not None:
            assert segments.labels is not None
            assert segments.labels[row] == pair.label
    assert (segments.labels is None) == (expected[0].label is None)


@settings(deadline=None)
@given(blocks, lengths, shares, shares, keys)
def test_segment_pairs_are_those_of_the_literal_procedure(
    block: Block, length: int, short: float, random: float, key: Key
) -> None:
    config = SegmentPairs(packing="segment_pair", short=short, random=random)
    assert_rows(config.draw_segments(block, length, key), literal_segment_pairs(block, config, length, key), length)


@settings(deadline=None)
@given(blocks, lengths, shares, keys)
def test_sentence_pairs_are_those_of_the_literal_procedure(block: Block, length: int, random: float, key: Key) -> None:
    config = SentencePairs(packing="sentence_pair", random=random)
    assert_rows(config.draw_segments(block, length, key), literal_sentence_pairs(block, config, length, key), length)


@settings(deadline=None)
@given(blocks, lengths, shares, shares, st.sampled_from(["cut", "random"]), keys)
def test_ordered_pairs_are_those_of_the_literal_procedure(
    block: Block, length: int, short: float, swapped: float, lone_sentence: str, key: Key
) -> None:
    config = OrderedPairs.model_validate(
        {"packing": "ordered_pair", "short": short, "swapped": swapped, "lone_sentence": lone_sentence}
    )
    assert_rows(config.draw_segments(block, length, key), literal_ordered_pairs(block, config, length, key), length)


@settings(deadline=None)
@given(blocks, lengths, shares, shares, keys)
def test_two_segments_are_those_of_the_literal_procedure(
    block: Block, length: int, single: float, short: float, key: Key
) -> None:
    config = TwoSegments(packing="two_segments", single=single, short=short)
    assert_rows(config.draw_segments(block, length, key), literal_two_segments(block, config, length, key), length)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1), st.integers(5, 100), keys)
def test_pairs_are_cut_to_size_inside_their_text(sizes: list[tuple[int, int]], room: int, key: Key) -> None:
    a, b = np.array(sizes).T
    (a_start, a_stop), (b_start, b_stop) = chunks.truncate_pairs((0 * a, a), (1000 + 0 * b, 1000 + b), room, key)
    expected = [cut_sizes(Pair([0] * x, [0] * y, None), room) for x, y in sizes]
    assert list(zip(a_stop - a_start, b_stop - b_start, strict=True)) == expected
    assert (a_start >= 0).all()
    assert (a_stop <= a).all()
    assert (b_start >= 1000).all()
    assert (b_stop <= 1000 + b).all()


def test_tokens_are_cut_from_either_end_alike() -> None:
    """The number cut from the front is binomial: mean n / 2, variance n / 4."""
    n, losses = 200_000, 130  # more than a word of bits
    begin = np.zeros(n, dtype=np.int64)
    (fronts, _), _ = chunks.truncate_pairs((begin, begin + 100 + losses), (begin, begin), 100, stream_key("test"))
    assert abs(fronts.mean() - losses / 2) < 5 * np.sqrt(losses / 4 / n)
    assert abs(fronts.var() / (losses / 4) - 1) < 5 * np.sqrt(2 / n)


def test_draws_are_uniform_and_apart() -> None:
    """What the constructions above are made of, so that their shares are those of the settings."""
    key, numbers = stream_key("draws"), np.arange(700_000)
    counts = np.bincount(chunks.draw_integers_below(key, "one", numbers, 7), minlength=7)
    assert ((counts - 1e5) ** 2 / 1e5).sum() < 27.9  # chi-square, 6 degrees, p = 1e-4
    for share in (0.0, 0.05, 0.1, 0.5, 1.0):
        found = chunks.draw_bernoulli(key, "two", numbers, share)
        assert abs(found.mean() - share) <= 5 * np.sqrt(share * (1 - share) / len(numbers))
    one, other = (chunks.draw_bernoulli(key, purpose, numbers, 0.5) for purpose in ("one", "other"))
    for first, second in ((one, other), (one[1:], one[:-1])):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(len(numbers))


def test_the_shares_are_the_published_ones() -> None:
    """Devlin et al. 2019, appendix A.2; google-research/bert's short_seq_prob; Lan et al. 2019, section 3.1;
    google-research/electra's build_pretraining_dataset.py."""
    segments, sentences = SegmentPairs(packing="segment_pair"), SentencePairs(packing="sentence_pair")
    assert (segments.random, segments.short, sentences.random) == (0.5, 0.1, 0.5)
    ordered, two = OrderedPairs(packing="ordered_pair"), TwoSegments(packing="two_segments")
    assert (ordered.swapped, two.single, two.short) == (0.5, 0.1, 0.05)
