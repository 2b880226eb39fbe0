"""The stream over real shards: every token once, masks that belong to rows, counts that are kept, refusals."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.errors import CorpusError, CorruptBlock, PlanError
from data_service.samples.masking import MlmMasking
from data_service.samples.packing import Packing
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.store.open import open_store
from data_service.stream.counts import CountingPass, PassResult, ReportCountedBlocks, RowCounter, run_in_process
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from tests.support.data.corpora import random_block, source_of, spec_of, text_of, write_corpus

BLOCKS = [random_block(seed, 900 + 100 * seed) for seed in range(6)]
OTHER = [random_block(seed, 700) for seed in range(100, 103)]
HELDOUT = [random_block(200, 400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), BLOCKS, HELDOUT)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("other"), OTHER)


@pytest.mark.parametrize("packing", ["full_sentences", "doc_sentences", "contiguous"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_token_once_an_epoch(corpus: str, other: str, packing: Packing, epoch: int) -> None:
    stream = Stream(spec_of(source_of(corpus), source_of(other, "other"), input={"packing": packing}))
    samples = stream.read(epoch, 0, stream.samples_per_epoch)
    expected = np.bincount(np.concatenate([block.tokens for block in BLOCKS + OTHER]))
    np.testing.assert_array_equal(np.bincount(text_of(samples)), expected)


def test_the_heldout_split_is_another_array(corpus: str) -> None:
    stream = Stream(spec_of(source_of(corpus), split="heldout"))
    text = text_of(stream.read(0, 0, stream.samples_per_epoch))
    assert sorted(text.tolist()) == sorted(HELDOUT[0].tokens.tolist())


def test_masks_belong_to_the_row_not_to_its_neighbours(tmp_path: Path) -> None:
    """The same corpus with windows of another size: other order, same masked rows."""
    uri = write_corpus(tmp_path / "c", BLOCKS)
    small, large = (Stream(spec_of(source_of(uri), window={"least_tokens": n})) for n in (500, 5000))
    count = small.samples_per_epoch

    def rows(stream: Stream) -> set[bytes]:
        return {stream.read(0, n, n + 1).tokens.tobytes() for n in range(count)}

    assert rows(small) == rows(large)
    assert not np.array_equal(small.read(0, 0, count).tokens, large.read(0, 0, count).tokens)


@pytest.mark.parametrize("count", [RowCounter.count_rows, RowCounter.measure_rows])
def test_a_pass_that_was_interrupted_goes_on(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    monkeypatch.setattr("data_service.stream.counts._BLOCKS_PER_PIECE", 2)
    corpora, cache = Corpora(spec_of(source_of(corpus))), open_store(tmp_path / "cache")
    blocks, done = len(corpora.tables[0]), list[range]()

    def dies_at_the_third(job: Any, corpora: Corpora, source: int, part: range, counted: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(part)
        return run_in_process(job, corpora, source, part, counted)

    with pytest.raises(KeyboardInterrupt):
        count(RowCounter(cache, dies_at_the_third), corpora)
    again: list[range] = []

    def noted(job: Any, corpora: Corpora, source: int, part: range, counted: Any) -> Any:
        again.append(part)
        return run_in_process(job, corpora, source, part, counted)

    told: list[int] = []
    (found,) = count(RowCounter(cache, noted, told.append), corpora)
    assert done == [range(0, 2), range(2, 4)]
    assert again[0] == range(4, 6)
    assert sum(told) == blocks
    np.testing.assert_array_equal(found, count(RowCounter(), corpora)[0])
    assert len(list(cache.list())) == 1


def test_contiguous_packing_counts_without_reading(corpus: str) -> None:
    def never(
        job: CountingPass, corpora: Corpora, source: int, blocks: range, counted: ReportCountedBlocks
    ) -> PassResult:
        raise AssertionError("read")

    corpora = Corpora(spec_of(source_of(corpus), input={"packing": "contiguous"}))
    (counts,) = RowCounter(run=never).count_rows(corpora)
    assert counts.sum() == len(RowCounter().measure_rows(corpora)[0])


def test_counts_of_another_corpus_are_noticed(corpus: str, tmp_path: Path) -> None:
    spec, cache = spec_of(source_of(corpus)), open_store(tmp_path / "cache")
    RowCounter(cache).count_rows(Corpora(spec))
    (entry,) = cache.list()
    longer = spec_of(source_of(corpus), length=16)
    counted = tmp_path / "longer"
    RowCounter(open_store(counted)).count_rows(Corpora(longer))
    (long_entry,) = open_store(counted).list()
    cache.put(entry.key, open_store(counted).get(long_entry.key))
    stream = Stream(spec, cache=cache)
    with pytest.raises(CorpusError, match=r"\b\d+ rows, .*\b\d+\b"):
        stream.read(0, 0, stream.samples_per_epoch)


def test_another_corpus_at_the_address_is_refused(corpus: str, other: str) -> None:
    moved = source_of(corpus).model_copy(update={"uri": other})
    with pytest.raises(CorpusError, match=r"\btext: .*\bfingerprint\b"):
        Stream(spec_of(moved))


def test_a_corpus_of_another_vocabulary_is_refused(corpus: str) -> None:
    with pytest.raises(CorpusError, match=r"\b500 ids\b.*\b600\b"):
        Stream(spec_of(source_of(corpus), vocab_size=600))


def test_an_empty_split_is_refused(other: str) -> None:
    with pytest.raises(PlanError, match=r"\bheldout\b"):
        Stream(spec_of(source_of(other), split="heldout"))


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "c", BLOCKS)
    shard = tmp_path / "c" / "train" / "000000.tar"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptBlock, match=r"train/000000\.tar, block \d"):
        Stream(spec_of(source_of(uri)), windows=1).read(0, 0, 40 * 5)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 4), (-1, 3), (0, 10**6)])
def test_ranges_outside_are_refused(corpus: str, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        Stream(spec_of(source_of(corpus))).read(0, start, stop)


def test_the_spec_survives_json_and_tells_what_matters_from_what_does_not(corpus: str) -> None:
    spec = spec_of(source_of(corpus))
    assert StreamSpec.model_validate_json(spec.model_dump_json()) == spec
    moved = spec.sources[0].model_copy(update={"uri": "s3://elsewhere"})
    assert spec.model_copy(update={"sources": (moved,)}).fingerprint == spec.fingerprint
    for change in ({"seed": 8}, {"length": 33}, {"masking": MlmMasking(rate=0.2)}, {"split": "heldout"}):
        assert StreamSpec.model_validate(spec.model_dump() | change).fingerprint != spec.fingerprint


def test_weights_for_some_sources_only_are_refused() -> None:
    named = [SourceSpec(name=n, uri=n, manifest_fingerprint=n, weight=w) for n, w in (("a", 1.0), ("b", None))]
    with pytest.raises(ValueError, match=r"\bweights\b.*\ba\b"):
        spec_of(*named)


@pytest.mark.long
def test_what_streams_training_data_does_not_import_sidecars() -> None:
    code = "import sys, data_service.stream.stream; print([m for m in sys.modules if 'sidecar' in m or 'pyarrow' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
