"""The bytes of a stream are pinned: a change here changes what every existing run would read when it resumes."""

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from data_service.rng import stream_key
from data_service.samples.lane_rows import permuted_rows
from data_service.samples.lanes import Lanes, lane_rows
from data_service.samples.masking import MlmMasking
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.replacement import Replacement
from data_service.samples.samples import Samples
from data_service.stream.stream import Stream
from data_service.tokenizers.specials import SpecialIds
from tests.support.data.corpora import VOCABULARY, source_of, spec_of, write_corpus, write_vocabulary, written_out

GOLDEN = {
    ("full_sentences", "token"): "c67fcad3f97bab10",
    ("doc_sentences", "token"): "6196493cf53e981b",
    ("contiguous", "token"): "461a99370496e888",
    ("full_sentences", "bert"): "3661bf425d9e5a18",
    ("segment_pair", "token"): "d4e13fc63348ba98",
    ("sentence_pair", "token"): "174ccf067655c07b",
    ("ordered_pair", "token"): "a95617861909a187",
    ("two_segments", "token"): "d80ab8fc327524e6",
}

UNIGRAM = Replacement(random_from="unigram")
SCHEMES = {
    "whole_word": (MlmMasking(unit="whole_word"), "a3e125cd3858aa6d"),
    "ngram": (MlmMasking(unit="ngram", count="bert"), "16ab252790f323ea"),
    "span": (MlmMasking(unit="span", count="ceil", replace=UNIGRAM), "caa516aa0cb50a25"),
    "drawn": (MlmMasking(count="drawn"), "4070e97272961c9a"),
}

GOLDEN_LANES = {"whole_word": "09caece7ad2a445b", "piece": "e277057765aa847d"}


@pytest.mark.parametrize(("packing", "masking"), GOLDEN)
def test_the_bytes_of_an_epoch(tmp_path: Path, packing: str, masking: str) -> None:
    uri = write_corpus(tmp_path / "c", [written_out(number) for number in range(5)])
    settings = {
        "token": MlmMasking(),
        "bert": MlmMasking(count="bert", max_predictions=4, copies=2),
    }[masking]
    stream = Stream(spec_of(source_of(uri), input={"packing": packing}, masking=settings))
    samples = stream.read(3, 0, stream.samples_per_epoch)
    assert digest_of(samples) == GOLDEN[packing, masking]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bytes_of_every_other_masking_scheme(tmp_path: Path, scheme: str) -> None:
    masking, golden = SCHEMES[scheme]
    uri = write_corpus(tmp_path / "c", [written_out(number) for number in range(5)])
    write_vocabulary(uri)
    stream = Stream(spec_of(source_of(uri), masking=masking))
    samples = stream.read(3, 0, stream.samples_per_epoch)
    digest = hashlib.sha256()
    for column in (samples.tokens, samples.offsets, samples.target_positions, samples.target_ids):
        digest.update(column.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == golden


def test_the_bytes_of_an_epoch_with_neighbours_apart(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "c", [written_out(number) for number in range(5)])
    stream = Stream(spec_of(source_of(uri), window={"least_tokens": 1000, "stretches": 16}))
    assert digest_of(stream.read(3, 0, stream.samples_per_epoch)) == "bdfdba030b5047e5"


@pytest.mark.parametrize("unit", GOLDEN_LANES)
def test_the_bytes_of_lanes(unit: Literal["whole_word", "piece"]) -> None:
    block, lanes = written_out(0), Lanes(packing="lanes", reuse=16)
    rows = lane_rows(block, lanes, 45)
    assert len(rows) > 100
    special = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)
    starts_word = np.arange(VOCABULARY) % 3 != 1
    key, config = stream_key("pinned"), PermutedPrediction(predict=7, unit=unit)
    samples = permuted_rows(block, rows, 0, len(rows), config, special, tuple(range(5)), key, starts_word)
    assert digest_of(samples) == GOLDEN_LANES[unit]


def digest_of(samples: Samples) -> str:
    digest = hashlib.sha256()
    for field in fields(Samples):
        column = getattr(samples, field.name)
        digest.update(b"" if column is None else column.astype("<i8").tobytes())
    return digest.hexdigest()[:16]
