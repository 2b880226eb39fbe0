"""Permuted prediction: which tokens are targets, and what each may see, against literal statements of the rules."""

from itertools import pairwise

import numpy as np
import pytest

from data_service.rng import stream_key
from data_service.samples.lane_rows import permuted_rows
from data_service.samples.lanes import Lanes, lane_rows
from data_service.samples.permutation_lm import PermutedPrediction, choose_ngrams, choose_targets, factorisation_order
from data_service.samples.samples import Samples, join_rows
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, VOCABULARY, random_block

KEY = stream_key("test")
STARTS_WORD = np.random.default_rng(0).random(VOCABULARY) < 0.7
STARTS_WORD[list(NEVER_MASKED)] = True


def rows_of(
    block: Block,
    config: PermutedPrediction,
    *,
    reuse: int,
    length: int,
    start: int = 0,
    stop: int | None = None,
) -> Samples:
    rows = lane_rows(block, Lanes(packing="lanes", reuse=reuse), length)
    stop = len(rows) if stop is None else stop
    return permuted_rows(block, rows, start, stop, config, SPECIAL, NEVER_MASKED, KEY, STARTS_WORD)


def literal_ngrams(
    begins: list[bool], fixed: list[bool], goal: int, config: PermutedPrediction, draws: list[int]
) -> set[int]:
    """One row, token by token."""
    shares = [1 / n for n in range(1, config.longest + 1)]
    chosen: set[int] = set()
    at, width = 0, len(begins)
    for draw in draws:
        if at >= width or len(chosen) >= goal:
            break
        high, low = draw >> 32, draw & 0xFFFFFFFF
        n = 1
        while n < config.longest and high >= round(sum(shares[:n]) / sum(shares) * 2**32):
            n += 1
        n = min(n, goal - len(chosen))
        context = n * config.context // config.chosen
        before = (low * context) >> 32
        start = at + before
        while start < width and (fixed[start] or not begins[start]):
            start += 1
        ends: list[int] = []  # after one word, after two, ...
        place = start + 1
        while place < width and len(ends) < n:
            if config.unit == "piece" or begins[place]:
                ends.append(place)
            if fixed[place]:
                break
            place += 1
        if len(ends) < n and place == width:
            ends.append(width)
        ends = [end for end in ends if end - start <= goal - len(chosen)]
        if start >= width or not ends or ends[-1] == width:
            break
        chosen |= set(range(start, ends[-1]))
        at = ends[-1] + context - before
    return chosen


@pytest.mark.parametrize("unit", ["whole_word", "piece"])
@pytest.mark.parametrize(("context", "chosen", "longest"), [(6, 1, 5), (3, 2, 3), (1, 4, 2), (2, 1, 1)])
def test_targets_are_those_of_the_rule(unit: str, context: int, chosen: int, longest: int) -> None:
    config = PermutedPrediction.model_validate({"unit": unit, "context": context, "chosen": chosen, "longest": longest})
    rng = np.random.default_rng(longest)
    rows, width, goal = 400, 60, 14
    fixed = rng.random((rows, width)) < 0.03
    begins = (rng.random((rows, width)) < 0.6) | fixed
    begins[:, 1:] |= fixed[:, :-1]
    begins[:, 0] = True
    draws = rng.integers(0, 1 << 64, (rows, goal), dtype=np.uint64)
    keys = rng.integers(0, 1 << 32, (rows, width), dtype=np.uint32)
    ngrams = choose_ngrams(begins, fixed, goal, config, draws)
    targets = choose_targets(begins, fixed, goal, config, draws, keys)
    for row in range(rows):
        flags = begins[row].tolist(), fixed[row].tolist()
        expected = literal_ngrams(*flags, goal, config, draws[row].tolist())
        assert set(np.flatnonzero(ngrams[row]).tolist()) == expected
        free = [place for place in range(width) if place not in expected and not fixed[row, place]]
        free.sort(key=lambda place: (keys[row, place], place))
        expected |= set(free[: goal - len(expected)])
        assert set(np.flatnonzero(targets[row]).tolist()) == expected
        assert len(expected) == goal


def test_a_row_with_too_few_tokens_has_as_many_targets_as_it_can() -> None:
    fixed = np.ones((2, 8), dtype=np.bool_)
    fixed[1, 2:5] = False
    draws, keys = np.zeros((2, 4), dtype=np.uint64), np.zeros((2, 8), dtype=np.uint32)
    found = choose_targets(np.ones_like(fixed), fixed, 4, PermutedPrediction(), draws, keys)
    np.testing.assert_array_equal(found, ~fixed)


def literal_visibility(
    targets: np.ndarray, functional: np.ndarray, index: np.ndarray, reuse: int
) -> tuple[np.ndarray, np.ndarray]:
    """`_local_perm` of zihangdai/xlnet for one row: [L, L] bool, what content and query of i see of j.

    `index` is each token's place in the permutation of its part.
    """
    length = len(targets)
    content, query = np.zeros((length, length), bool), np.zeros((length, length), bool)
    for i in range(length):
        for j in range(length):
            if (i < reuse) != (j < reuse):
                query[i, j] = i >= reuse
            else:
                hidden = targets[j] or functional[j]
                rev_j = index[j] if hidden else -1
                rev_i = index[i] if targets[i] or functional[i] else -1
                self_i = rev_i if targets[i] else rev_i + 1
                query[i, j] = not (self_i <= rev_j and hidden)
            content[i, j] = query[i, j] or i == j
    return content, query


def test_order_says_what_the_published_code_lets_each_token_see() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        reuse, rest, permutation = 12, 15, int(rng.choice([4, 6, 256]))
        targets = rng.random(reuse + rest) < 0.3
        functional = np.zeros_like(targets)
        functional[[reuse + int(rng.integers(1, rest - 3)), -2, -1]] = True
        targets &= ~functional
        keys = rng.permutation(reuse + rest).astype(np.uint32)
        groups = [*(np.arange(reuse) // permutation), *(np.arange(rest) // permutation)]
        index = np.empty(reuse + rest, dtype=np.int64)
        for part in (slice(0, reuse), slice(reuse, None)):
            index[part] = np.argsort(np.lexsort((keys[part], groups[part])))
        content, query = literal_visibility(targets, functional, index, reuse)
        (order,) = factorisation_order((targets | functional)[None], keys[None], reuse, permutation)
        np.testing.assert_array_equal(order[None, :] <= order[:, None], content)
        np.testing.assert_array_equal((order[None, :] < order[:, None])[targets], query[targets])


def test_a_prediction_rests_on_nothing_at_or_after_its_place() -> None:
    """Whatever a prediction sees has itself seen only what the prediction may see, however many layers there are."""
    samples = rows_of(random_block(1, 800), PermutedPrediction(predict=12), reuse=24, length=64)
    for row in range(samples.rows):
        start, stop = samples.offsets[row : row + 2]
        assert samples.order is not None
        order = samples.order[start:stop]
        content = (order[None, :] <= order[:, None]).astype(np.int64)
        reached = np.linalg.matrix_power(content, 8) > 0
        targets = samples.target_positions[(samples.target_positions >= start) & (samples.target_positions < stop)]
        for target in targets - start:
            sees = order < order[target]
            assert not (reached[sees] & ~sees).any()
            assert not sees[target]


@pytest.mark.parametrize("unit", ["whole_word", "piece"])
def test_at_the_published_size_one_token_in_six_is_a_target(unit: str) -> None:
    """43 and 42 a row, none of them special, one token in six; inputs stay as they are."""
    block = random_block(2, 100_000, sentence=25, document=20)
    samples = rows_of(block, PermutedPrediction.model_validate({"unit": unit}), reuse=256, length=512)
    tokens = samples.tokens.reshape(-1, 512)
    chosen = np.zeros(tokens.shape, dtype=np.bool_)
    chosen.ravel()[samples.target_positions] = True
    assert (chosen[:, :256].sum(axis=1) == 43).all()
    assert (chosen[:, 256:].sum(axis=1) == 42).all()
    assert 6 < tokens.size / chosen.sum() < 7
    assert not np.isin(samples.target_ids, NEVER_MASKED).any()
    np.testing.assert_array_equal(samples.tokens[samples.target_positions], samples.target_ids)
    assert (np.diff(samples.target_positions) > 0).all()
    assert samples.order is not None
    order = samples.order.reshape(-1, 512)
    assert (np.sort(order[:, :256], axis=1)[:, -43:] == np.arange(1, 44)).all()
    assert ((order[:, :256] > 0) == chosen[:, :256]).all()
    assert (order[:, 256:].min(axis=1) == 44).all()
    assert (order.max(axis=1) == 43 + 1 + 42 + 3).all()


def test_a_row_alone_is_the_row_among_others() -> None:
    """Also over the edge of what is made at once."""
    block, config = random_block(4, 150_000), PermutedPrediction()
    whole = rows_of(block, config, reuse=128, length=512)
    assert whole.rows > 1500
    cuts = [0, 1, 2, 511, 700, 701, 1025, whole.rows]
    parts = [rows_of(block, config, reuse=128, length=512, start=start, stop=stop) for start, stop in pairwise(cuts)]
    joined = join_rows(parts)
    for column in vars(whole):
        np.testing.assert_array_equal(getattr(joined, column), getattr(whole, column), err_msg=column)


def test_equal_keys_have_one_order() -> None:
    ordered = np.ones((1, 6), dtype=np.bool_)
    found = factorisation_order(ordered, np.zeros((1, 6), dtype=np.uint32), 3, 256)
    assert found.tolist() == [[1, 2, 3, 5, 6, 7]]
