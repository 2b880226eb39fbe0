"""The bytes of every masking scheme are pinned beyond those of the oldest ones in `test_data_bytes`."""

import hashlib
from pathlib import Path

import pytest

from data_service.samples.masking import MlmMasking
from data_service.samples.replacement import Replacement
from data_service.stream.stream import Stream
from tests.support.data.corpora import source_of, spec_of, write_corpus, write_vocabulary, written_out

UNIGRAM = Replacement(random_from="unigram")
GOLDEN = {
    "whole_word": (MlmMasking(unit="whole_word"), "a3e125cd3858aa6d"),
    "ngram": (MlmMasking(unit="ngram", count="bert"), "16ab252790f323ea"),
    "span": (MlmMasking(unit="span", count="ceil", replace=UNIGRAM), "caa516aa0cb50a25"),
    "drawn": (MlmMasking(count="drawn"), "4070e97272961c9a"),
}


@pytest.mark.parametrize("scheme", GOLDEN)
def test_the_bytes_of_an_epoch(tmp_path: Path, scheme: str) -> None:
    masking, golden = GOLDEN[scheme]
    uri = write_corpus(tmp_path / "c", [written_out(number) for number in range(5)])
    write_vocabulary(uri)
    stream = Stream(spec_of(source_of(uri), masking=masking))
    samples = stream.read(3, 0, stream.samples_per_epoch)
    digest = hashlib.sha256()
    for column in (samples.tokens, samples.offsets, samples.target_positions, samples.target_ids):
        digest.update(column.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == golden
