"""Rows of a corpus from which documents were taken out: what they held is gone, and nothing else has moved.

The text of removed documents has ids of its own here, so that it is known wherever it may turn up.
"""

import shutil
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.corpus import open_corpus
from data_service.corpus.removals import load_removals, replace_removed_text
from data_service.corpus.remove import documents_by_number, remove_documents
from data_service.errors import CorpusError
from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows, row_text_ranges, token_ranges_of_row
from data_service.samples.samples import Samples, distribute_rows, join_rows, slice_rows
from data_service.store.local import LocalStore
from data_service.stream.stream import Stream
from data_service.types import Block
from tests.support.data.corpora import (
    SPECIAL,
    VOCABULARY,
    originals,
    random_block,
    source_of,
    spec_of,
    write_corpus,
    write_vocabulary,
)
from tests.support.data.row_settings import block_for, is_of_corpora, masked_rows, spec_with, tables_for

FROM = 300  # ids of removed text


def with_marked(block: Block, removed: set[int]) -> tuple[Block, np.ndarray]:
    """The block with ids from `FROM` on in these documents only, and their stretches, [K, 2]."""
    edges, tokens = block.sentences[block.documents], 5 + block.tokens % (FROM - 5)
    stretches = np.array([edges[number : number + 2] for number in sorted(removed)]).reshape(-1, 2)
    for start, stop in stretches:
        tokens[start:stop] = FROM + block.tokens[start:stop] % (VOCABULARY - FROM)
    return replace(block, tokens=tokens.astype(np.uint16)), stretches


def assert_gone(before: Samples, after: Samples) -> None:
    """All of the removed text is a hole, no target, and the rows without a hole are the same bytes as before."""
    np.testing.assert_array_equal(before.offsets, after.offsets)
    text = originals(before)
    holes = np.flatnonzero(text >= FROM)
    found = np.zeros(0, dtype=np.int64) if after.holes is None else after.holes
    np.testing.assert_array_equal(found, _with_lost_rows(before, holes) if before.order is None else holes)
    text[holes] = SPECIAL.pad
    np.testing.assert_array_equal(originals(after), text)
    assert not np.isin(after.target_positions, holes).any()
    assert (np.diff(after.target_positions) > 0).all()
    assert before.holes is None
    spoilt = set((np.searchsorted(before.offsets, holes, side="right") - 1).tolist())
    for row in range(before.rows):
        if row not in spoilt:
            same, other = slice_rows(before, row, row + 1), slice_rows(after, row, row + 1)
            for field in fields(Samples):
                ours, theirs = getattr(same, field.name), getattr(other, field.name)
                if field.name == "holes":
                    assert theirs is None or not len(theirs)
                else:
                    np.testing.assert_array_equal(ours, theirs)


def _with_lost_rows(samples: Samples, holes: np.ndarray) -> np.ndarray:
    """The holes, and all tokens of rows whose other tokens are special."""
    text, found = originals(samples), set(holes.tolist())
    for start, stop in pairwise(samples.offsets.tolist()):
        ids = text[start:stop]
        if (ids >= FROM).any() and not ((ids >= 5) & (ids < FROM)).any():
            found |= set(range(start, stop))
    return np.array(sorted(found), dtype=np.int64)


@settings(deadline=None)
@given(masked_rows(), st.integers(0, 999), st.integers(100, 900), st.data())
def test_any_rows_of_a_block(chosen: dict[str, Any], seed: int, size: int, data: st.DataObject) -> None:
    spec = spec_with(chosen)
    drawn = block_for(chosen, seed, size)
    count = len(drawn.documents) - 1
    removed = data.draw(st.sets(st.integers(0, count - 1), max_size=count))
    block, stretches = with_marked(drawn, removed)
    tables = tables_for(spec)
    hollow, made = replace_removed_text(block, stretches, SPECIAL.pad), []
    for each in (block, hollow):
        rows = cut_block(each, spec, stream_key("cut"))
        if not len(rows):
            return
        made.append(make_rows(each, rows, 0, len(rows), spec, stream_key("test"), tables))
    before, after = made
    assert_gone(before, after)
    of_row, starts, stops = row_text_ranges(block, rows, spec, stream_key("test"))
    within = np.array([(starts < stop) & (stops > start) for start, stop in stretches]).reshape(-1, len(starts))
    marked = np.flatnonzero(originals(before) >= FROM)
    seen = np.searchsorted(before.offsets, marked, side="right") - 1
    assert set(of_row[within.any(axis=0)].tolist()) == set(seen.tolist())
    own = [token_ranges_of_row(block, rows, row, spec, stream_key("test")) for row in range(len(rows))]
    assert [(row, part.start, part.stop) for row, parts in enumerate(own) for part in parts] == list(
        zip(of_row.tolist(), starts.tolist(), stops.tolist(), strict=True)
    )
    order = np.random.default_rng(seed).permutation(after.rows)
    middle = data.draw(st.integers(0, len(order)))
    parts = (order[:middle], order[middle:])
    for one, other in zip(distribute_rows(before, parts), distribute_rows(after, parts), strict=True):
        assert_gone(one, other)
    assert_gone(join_rows([before, before]), join_rows([after, slice_rows(after, 0, after.rows)]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A corpus with two removals, of a third of its documents; its URI, and the digests after each."""
    blocks: dict[str, list[Block]] = {"train": [], "heldout": []}
    names: list[str] = []
    for split, sizes in (("train", (900, 350, 610)), ("heldout", (300, 200))):
        before = 0
        for size in sizes:
            block = random_block(size, size)
            count = len(block.documents) - 1
            third = set(range(1, count, 3))
            blocks[split].append(with_marked(block, third)[0])
            names += [f"{split}:{before + number}" for number in sorted(third)]
            before += count
    uri = write_corpus(tmp_path_factory.mktemp("corpus"), blocks["train"], blocks["heldout"])
    write_vocabulary(uri)
    opened = open_corpus(uri)
    for part in (names[::2], names[1::2]):
        remove_documents(opened, documents_by_number(opened, part), removed_by="x", removed_at=1, reason="r")
    chain = load_removals(opened.store, opened.manifest)
    digests = [removal.digest for removal in chain.removals]
    return uri, digests[0], digests[1]


@pytest.mark.long
@settings(deadline=None, max_examples=6)
@given(
    masked_rows().filter(lambda drawn: is_of_corpora(drawn) and drawn["input"]["packing"] != "pairs"),
    st.integers(0, 3),
)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_stream_reads_them_no_more_and_has_all_else_where_it_was(
    corpus: tuple[str, str, str], split: str, chosen: dict[str, Any], epoch: int
) -> None:
    uri, first, last = corpus
    chosen = chosen | {"split": split, "window": {"samples": 20, "least_tokens": 1}}
    source = source_of(uri)
    plain = Stream(spec_of(source, **chosen))
    hollow = Stream(spec_of(source.model_copy(update={"removals": last}), **chosen))
    count = plain.samples_per_epoch
    assert hollow.samples_per_epoch == count
    before, after = plain.read(epoch, 0, count), hollow.read(epoch, 0, count)
    assert_gone(before, after)
    half = Stream(spec_of(source.model_copy(update={"removals": first}), **chosen)).read(epoch, 0, count)
    held, of_all = (set() if one.holes is None else set(one.holes.tolist()) for one in (half, after))
    text = originals(before)
    gone = originals(half) != text
    assert set(np.flatnonzero(gone).tolist()) <= held <= of_all
    assert (originals(half)[gone] == SPECIAL.pad).all()
    assert (text[gone] >= FROM).all()


def test_specs_without_removals_are_as_they_were_and_others_differ(corpus: tuple[str, str, str]) -> None:
    source = source_of(corpus[0])
    assert "removals" not in spec_of(source).model_dump_json()
    states = [spec_of(source.model_copy(update={"removals": state})) for state in ("", *corpus[1:])]
    assert len({state.fingerprint for state in states}) == 3


def test_a_stream_without_removals_does_not_look_for_them(
    corpus: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    listed = LocalStore.list
    monkeypatch.setattr(LocalStore, "list", lambda store, prefix="": asked.append(prefix) or listed(store, prefix))
    source = source_of(corpus[0])
    Stream(spec_of(source)).read(0, 0, 5)
    assert asked == []
    Stream(spec_of(source.model_copy(update={"removals": corpus[1]}))).read(0, 0, 5)
    assert asked == ["removals/"]


def test_a_lost_list_ends_a_stream(corpus: tuple[str, str, str], tmp_path: Path) -> None:
    shutil.copytree(corpus[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/removals")
    source = source_of(str(tmp_path / "copy")).model_copy(update={"removals": corpus[1]})
    with pytest.raises(CorpusError) as caught:
        Stream(spec_of(source))
    assert corpus[1][:12] in caught.value.problem
