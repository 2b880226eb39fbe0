"""Masking of words, n-grams and spans from raw text on: the corpus's own tokenizer says where words begin."""

from pathlib import Path

import numpy as np
import pytest

from data_service.ingest.build import build_corpus
from data_service.samples.masking import MlmMasking
from data_service.samples.replacement import Replacement
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.stream.stream import Stream
from tests.support.data.raw_text import DOCUMENTS, SMALL, small_tokenizer, tokenizer_folder, write_jsonl


@pytest.mark.parametrize("unit", ["whole_word", "ngram", "span"])
def test_words_of_real_text_are_masked_whole(tmp_path: Path, unit: str) -> None:
    tokenizer = small_tokenizer()
    text = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS[:20])
    folder = tokenizer_folder(tmp_path / "tokenizer")
    manifest = build_corpus([str(text)], str(tmp_path / "corpus"), folder, SMALL, lambda _: None)
    source = SourceSpec(name="text", uri=str(tmp_path / "corpus"), manifest_fingerprint=manifest.fingerprint)
    always = Replacement(mask=1, random=0, keep=0)
    spec = StreamSpec(
        sources=(source,),
        length=128,
        masking=MlmMasking.model_validate({"unit": unit, "replace": always}),
        special=tokenizer.special,
        never_masked=tuple(int(i) for i in np.flatnonzero(tokenizer.special_mask)),
        vocab_size=tokenizer.vocab_size,
        seed=3,
    )
    stream = Stream(spec)
    rows = stream.read(0, 0, stream.samples_per_epoch)
    hidden = rows.tokens == spec.special.mask
    assert hidden.sum() == len(rows.target_ids)
    original = rows.tokens.copy()
    original[rows.target_positions] = rows.target_ids
    # Inside a word (a piece that starts none, after ordinary text) both neighbours are hidden, or neither is.
    ordinary = ~tokenizer.special_mask[original]
    inside = ~tokenizer.word_starts[original[1:]] & ordinary[1:] & ordinary[:-1]
    assert inside.sum() > 1000
    np.testing.assert_array_equal(hidden[1:][inside], hidden[:-1][inside])
    assert 0.13 < len(rows.target_ids) / ordinary.sum() < 0.16
