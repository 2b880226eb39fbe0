"""A window takes the memory that its plan says, whatever is masked and how rows are made."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.stream.counts import RowCounter
from data_service.stream.plan import StreamPlan
from data_service.stream.sources import Corpora
from data_service.stream.stream import SlabLayout, build_window
from data_service.tokenizers.load import save_tokenizer
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus
from tests.support.data.raw_text import small_tokenizer


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("c") / "c"
    uri = write_corpus(folder, [random_block(seed, 8000) for seed in range(4)])
    save_tokenizer(small_tokenizer(), f"{uri}/tokenizer")
    return uri


def taken_and_planned(uri: str, **given: object) -> tuple[int, int]:
    """Bytes of the largest window's slabs, and what the plan says."""
    spec = spec_of(source_of(uri), **{"window": {"samples": 400, "least_tokens": 1}, **given})
    corpora = Corpora(spec)
    plan = StreamPlan(spec, corpora.tables, RowCounter().count_rows(corpora))
    sizes = [
        sum(
            slab.nbytes
            for slab in build_window(
                corpora, plan.window(0, w), SlabLayout.from_slab_rows(plan.epoch_layout.window_size(w), 300)
            )
        )
        for w in range(plan.epoch_layout.windows)
    ]
    return max(sizes), plan.epoch_layout.window_bytes


@pytest.mark.long
@settings(deadline=None, max_examples=25)
@given(
    st.floats(0.02, 0.8),
    st.sampled_from(["token", "whole_word", "ngram", "span"]),
    st.sampled_from(["full_sentences", "contiguous", "segment_pair", "ordered_pair"]),
    st.integers(24, 128),
)
def test_at_any_mask_rate(uri: str, rate: float, unit: str, packing: str, length: int) -> None:
    copies = {} if packing in ("full_sentences", "contiguous") else {"copies": 1}
    masking = {"kind": "mlm", "rate": rate, "unit": unit}
    taken, planned = taken_and_planned(uri, length=length, masking=masking, input={"packing": packing, **copies})
    assert taken <= 1.05 * planned
    assert planned <= 2 * taken


def test_windows_of_lanes_take_the_memory_that_is_planned(uri: str) -> None:
    masking = {"kind": "plm", "predict": 12}
    taken, planned = taken_and_planned(
        uri, length=40, lanes=12, masking=masking, input={"packing": "lanes", "reuse": 16}
    )
    assert taken <= 1.05 * planned <= 2 * taken
