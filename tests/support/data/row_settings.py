"""Settings of streams, drawn: rows of every packing, masked in every way, with blocks for them; mixtures of corpora."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from data_service.rng import Key, stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.masking import MaskingTables
from data_service.samples.packing import RowCuts
from data_service.samples.samples import Samples
from data_service.samples.similar_words import SimilarPair, dump_similar_words, parse_similar_words
from data_service.samples.spec import Masking, SourceSpec, StreamSpec
from data_service.stream.stream import Stream
from data_service.types import Block
from tests.support.data.corpora import (
    VOCABULARY,
    block_of_pairs,
    random_block,
    source_of,
    spec_of,
    write_corpus,
    write_vocabulary,
)

NOWHERE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
KEY = stream_key("test")
WORD_STARTS = np.arange(VOCABULARY) % 3 != 0
TABLES = MaskingTables(
    WORD_STARTS,
    np.arange(VOCABULARY),
    parse_similar_words(
        dump_similar_words(
            [SimilarPair((word,), (word + 200,)) for word in range(5, 300)],
            tokenizer="0" * 64,
            vocab_size=VOCABULARY,
            build_settings={},
        ),
        "table",
    ),
)
"""Two words of three begin with their own token; every word below 300 has a similar one."""
MACBERT = {"mask": 0, "similar": 0.8, "random": 0.1, "keep": 0.1}
PACKED = ("full_sentences", "doc_sentences", "contiguous")
SEGMENTS = ("segment_pair", "sentence_pair", "ordered_pair", "two_segments")


@st.composite
def masked_rows(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a spec with any packing and any masking by MLM or PLM, or texts without masking."""
    kind = draw(st.sampled_from(["packed", "segments", "lanes", "sentences", "pairs", "translations"]))
    length = draw(st.sampled_from([16, 32, 64]))
    if kind == "lanes":
        both, reuse = draw(st.booleans()), length // 2
        permuted = {"kind": "plm", "predict": 4, "unit": draw(st.sampled_from(["whole_word", "piece"]))}
        rows = {"packing": "lanes", "reuse": reuse, "both_directions": both}
        return {"length": length, "input": rows, "masking": permuted}
    if kind in ("sentences", "pairs"):
        layout = draw(st.sampled_from(["cls_first", "cls_last"]))
        return {"length": 16, "input": {"packing": kind}, "masking": {"kind": "none"}, "layout": layout}
    unit = draw(st.sampled_from(["token", "whole_word", "ngram", "span"]))
    masking: dict[str, Any] = {"kind": "mlm", "unit": unit, "rate": draw(st.floats(0.05, 0.5))}
    masking["count"] = draw(st.sampled_from(["stochastic", "bert", "ceil"]))
    if unit != "token" and draw(st.booleans()):
        masking["replace"] = MACBERT
    elif draw(st.booleans()):
        masking["replace"] = {"mask": 0.5, "random": 0.5, "keep": 0, "random_from": "unigram"}
    if kind == "translations":
        return {"length": length, "input": {"packing": kind}, "masking": masking}
    packing = draw(st.sampled_from(PACKED if kind == "packed" else SEGMENTS))
    return {"length": length, "input": {"packing": packing}, "masking": masking}


@st.composite
def any_rows(draw: st.DrawFn) -> dict[str, Any]:
    """The same, with every other objective on packed rows."""
    if draw(st.integers(0, 2)):
        return draw(masked_rows())
    other = draw(
        st.sampled_from(
            [
                {"kind": "clm"},
                {"kind": "diffusion"},
                {"kind": "denoise", "unit": "whole_word"},
                {"kind": "denoise", "unit": "token", "rate": 0.6},
                {"kind": "mlm", "count": "drawn"},
                {"kind": "mlm", "count_special": True, "max_predictions": 3},
            ]
        )
    )
    return {"length": 40, "input": {"packing": draw(st.sampled_from(PACKED))}, "masking": other}


def spec_with(drawn: dict[str, Any]) -> StreamSpec:
    """The spec with drawn settings, over one source that is nowhere."""
    packing = drawn["input"]["packing"]
    source = NOWHERE.model_copy(update={"languages": ("en", "fr")}) if packing == "translations" else NOWHERE
    return spec_of(source, **drawn)


def block_for(drawn: dict[str, Any], seed: int, tokens: int) -> Block:
    """A random block of which the settings make rows."""
    if drawn["input"]["packing"] in ("pairs", "translations"):
        return block_of_pairs(seed, tokens // 20, 2)
    return random_block(seed, tokens)


def tables_for(spec: StreamSpec) -> MaskingTables:
    """What the spec's masking reads beside the block."""
    masking = spec.masking
    random_from = getattr(getattr(masking, "replace", None), "random_from", "")
    return MaskingTables(
        None if masking.unit == "token" else TABLES.starts_word,
        TABLES.unigram if random_from == "unigram" else None,
        TABLES.similar,
    )


def packed_rows(
    block: Block, masking: Masking, packing: str = "full_sentences", length: int = 64, key: Key = KEY
) -> tuple[RowCuts, Samples]:
    """All rows of a block, packed and masked."""
    spec = spec_of(NOWHERE, length=length, masking=masking, input={"packing": packing})
    rows = cut_block(block, spec, key)
    assert isinstance(rows, RowCuts)
    return rows, make_rows(block, rows, 0, len(rows), spec, key, tables_for(spec))


Sources = dict[str, tuple[SourceSpec, ...]]


def write_sources(folder: Path) -> Sources:
    """Two corpora of text, and two of pairs."""
    texts = [[random_block(7 * n + size, size) for size in sizes] for n, sizes in enumerate(((900, 700), (500,)))]
    pairs = [[block_of_pairs(n, 40, 2)] for n in range(2)]
    uris = [write_corpus(folder / f"t{n}", blocks) for n, blocks in enumerate(texts)]
    for uri in uris:
        write_vocabulary(uri)
    return {
        "text": tuple(source_of(uri, f"t{n}") for n, uri in enumerate(uris)),
        "pairs": tuple(
            source_of(write_corpus(folder / f"p{n}", it, negatives=0), f"p{n}") for n, it in enumerate(pairs)
        ),
    }


def is_of_corpora(drawn: dict[str, Any]) -> bool:
    """Whether the corpora of `write_sources` say all that the rows need: no translations, no table of similar words."""
    return drawn["input"]["packing"] != "translations" and drawn["masking"].get("replace") != MACBERT


@st.composite
def streams(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a stream over both sources: shares, ways of mixing, windows, copies, stages, rates that change."""
    drawn = draw(any_rows().filter(is_of_corpora))
    packing, masking = drawn["input"]["packing"], drawn["masking"]
    drawn["window"] = {
        "samples": draw(st.sampled_from([20, 60])),
        "least_tokens": 1,
        "stretches": draw(st.sampled_from([1, 4])),
    }
    if packing in SEGMENTS:
        drawn["input"] = drawn["input"] | {"copies": draw(st.integers(1, 2))}
    if masking["kind"] == "mlm":
        drawn["masking"] = masking | {"copies": draw(st.sampled_from(["dynamic", 2]))}
    if packing == "lanes":
        return drawn | {"lanes": draw(st.sampled_from([None, 4]))}
    way = draw(st.sampled_from(["by size", "weights", "one source", "stages"]))
    if way == "weights":
        drawn["weights"] = (1.0, 2.0)
    if way == "one source":
        drawn |= {"one_source": 5, "temperature": draw(st.sampled_from([1.0, 2.0]))}
    if way == "stages" and packing in PACKED:
        stage = {"phase": 0, "length": 24, "units": 40, "weights": (1, 1)}
        drawn["stages"] = (stage, {"phase": 1, "length": drawn["length"], "units": 50})
        if masking["kind"] == "mlm":
            drawn["annealing"] = {"end": 0.1, "samples": 60, "before": 10}
    return drawn


def opened(sources: Sources, drawn: dict[str, Any], windows: int = 99) -> Stream:
    given_sources = sources["pairs" if drawn["input"]["packing"] == "pairs" else "text"]
    weights = drawn.get("weights", (None, None))
    chosen = [one.model_copy(update={"weight": weight}) for one, weight in zip(given_sources, weights, strict=True)]
    more = {name: value for name, value in drawn.items() if name != "weights"}
    return Stream(spec_of(*chosen, **more), windows=windows)
