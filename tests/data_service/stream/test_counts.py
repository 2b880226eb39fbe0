"""Row counts are kept between runs; what is kept is believed only if it is what was put there."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_service.store.open import open_store
from data_service.stream.counts import (
    CountingPass,
    PassResult,
    PassRunner,
    ReportCountedBlocks,
    RowCounter,
    run_in_process,
)
from data_service.stream.sources import Corpora
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus

Counting = Callable[..., tuple[np.ndarray, ...]]
KINDS: list[Counting] = [RowCounter.count_rows, RowCounter.measure_rows]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    uri = write_corpus(tmp_path_factory.mktemp("c") / "c", [random_block(seed, 900) for seed in range(3)])
    return Corpora(spec_of(source_of(uri)))


def watched(gone_through: list[int]) -> PassRunner:
    """The usual runner, and how many blocks it has gone through."""

    def run(
        job: CountingPass, corpora: Corpora, source: int, blocks: range, counted: ReportCountedBlocks
    ) -> PassResult:
        gone_through.append(len(blocks))
        return run_in_process(job, corpora, source, blocks, counted)

    return run


@pytest.mark.parametrize("count", KINDS)
def test_what_is_kept_is_not_counted_again(corpora: Corpora, count: Counting, tmp_path: Path) -> None:
    cache, gone_through = open_store(tmp_path), list[int]()
    counter = RowCounter(cache, watched(gone_through))
    first = count(counter, corpora)
    second = count(counter, corpora)
    assert gone_through == [3]
    other = Corpora(corpora.spec.model_copy(update={"length": 40}))
    count(counter, other)
    assert gone_through == [3, 3]
    np.testing.assert_array_equal(first[0], second[0])
    assert first[0].dtype == second[0].dtype


@pytest.mark.parametrize("count", KINDS)
def test_damage_of_any_kind_is_found_and_said(
    corpora: Corpora, count: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, draws = open_store(tmp_path), random.Random(5)
    true = count(RowCounter(cache), corpora)
    (entry,) = cache.list()
    whole = cache.get(entry.key)
    for _ in range(25):
        damaged = bytearray(whole)
        damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        cut = draws.choice([len(whole), draws.randrange(len(whole))])
        cache.put(entry.key, bytes(damaged[:cut]))
        caplog.clear()
        np.testing.assert_array_equal(count(RowCounter(cache), corpora)[0], true[0])
        assert "damaged" in caplog.text
        assert cache.get(entry.key) == whole
