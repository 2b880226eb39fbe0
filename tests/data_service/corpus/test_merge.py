"""A merged corpus is that of its parts one after another: the same documents, each once, and no shard written again."""

import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus import manifest_file
from data_service.corpus.corpus import SPLITS, Corpus, open_corpus, show_documents, verify_corpus
from data_service.corpus.manifest import CONFIGURATION_KEY, MANIFEST_KEY
from data_service.corpus.merge import MergeReport, merge_corpora
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.reader import read_block
from data_service.corpus.removals import load_removals
from data_service.corpus.remove import (
    documents_by_id,
    documents_by_number,
    find_removed_in_parts,
    find_unapplied_removals,
    remove_documents,
)
from data_service.corpus.sidecar import find_documents
from data_service.errors import CorpusError
from data_service.store.errors import BadUri
from data_service.stream.stream import Stream
from data_service.types import Block
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus
from tests.support.data.raw_text import DOCUMENTS, SMALL, build, files_of, write_jsonl

Documents = list[tuple[int, ...]]


def block_of(documents: list[tuple[int, ...]]) -> Block:
    """A block of these documents, each of one sentence."""
    sentences = np.cumsum([0, *map(len, documents)])
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    return Block(tokens, sentences, np.arange(len(documents) + 1))


def read(corpus: Corpus, split: str) -> list[Documents]:
    """The documents of each block."""
    table, blocks = corpus.table("train" if split == "train" else "heldout"), list[Documents]()
    for index in range(len(table)):
        block = read_block(corpus.store, table, index)
        edges = block.sentences[block.documents].tolist()
        blocks.append([tuple(block.tokens[start:stop].tolist()) for start, stop in pairwise(edges)])
    return blocks


def removed(corpus: Corpus, split: str) -> set[int]:
    return set(load_removals(corpus.store, corpus.manifest).removed_documents(split).documents.tolist())


def merge(uris: list[str], out: Path) -> MergeReport:
    return merge_corpora(uris, str(out), removed_by="x", removed_at=1)


def later_copies(parts: list[Corpus]) -> dict[str, set[int]]:
    """The numbers in the merged corpus of documents that an earlier part has, by a look at all of them."""
    listed = [
        (number, split, document)
        for number, part in enumerate(parts)
        for split in SPLITS
        for block in read(part, split)
        for document in block
    ]
    seen: dict[tuple[int, ...], int] = {}
    copies: dict[str, set[int]] = {split: set() for split in SPLITS}
    at = dict.fromkeys(map(str, SPLITS), 0)
    for number, split, document in listed:
        if seen.setdefault(document, number) < number:
            copies[split].add(at[split])
        at[split] += 1
    return copies


some_documents = st.lists(
    st.lists(st.tuples(st.integers(5, 7), st.integers(5, 7)) | st.tuples(st.integers(5, 7)), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(some_documents, some_documents), min_size=2, max_size=3), st.data())
def test_documents_one_after_another_and_later_copies_left_out(
    tmp_path_factory: pytest.TempPathFactory,
    given_parts: list[tuple[list[Documents], list[Documents]]],
    data: st.DataObject,
) -> None:
    """Held to a list of all documents; with removals before, and a merge of a merged corpus."""
    folder = tmp_path_factory.mktemp("parts")
    uris = []
    for number, sides in enumerate(given_parts):
        own = [*sides[0][0], (100 + number,)]  # no two parts are the same
        train, heldout = (list(map(block_of, side)) for side in ([own, *sides[0][1:]], sides[1]))
        uris.append(write_corpus(folder / str(number), train, heldout))
    gone: dict[str, set[int]] = {split: set() for split in SPLITS}
    parts, before = [open_corpus(uri) for uri in uris], dict.fromkeys(SPLITS, 0)
    expected: dict[str, list[Documents]] = {split: [] for split in SPLITS}
    for part in parts:
        for split in SPLITS:
            count = sum(map(len, read(part, split)))
            chosen = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
            if chosen:
                names = [f"{split}:{number}" for number in chosen]
                remove_documents(
                    part,
                    documents_by_number(part, names),
                    removed_by="y",
                    removed_at=2,
                    reason=f"of {part.store.uri}",
                )
            gone[split] |= {before[split] + number for number in chosen}
            before[split] += count
            expected[split] += read(part, split)
    carried = sum(map(len, gone.values()))
    for side, copies in later_copies(parts).items():
        gone[side] |= copies
    bytes_before = {uri: files_of(Path(uri)) for uri in uris}
    report = merge(uris, folder / "merged")
    nested = uris
    if len(uris) == 3:
        merge(uris[:2], folder / "two")
        nested = [str(folder / "two"), uris[2]]
        merge(nested, folder / "nested")
    for name in ("merged", "nested") if len(uris) == 3 else ("merged",):
        merged = open_corpus(str(folder / name))
        for split in SPLITS:
            assert read(merged, split) == expected[split]
            assert removed(merged, split) == gone[split]
        assert verify_corpus(str(folder / name)).damage == ()
        assert len(merged.manifest.parts) == len(uris)
        others = {key for key in files_of(folder / name) if not key.startswith("removals/")}
        assert others == {MANIFEST_KEY}
    total = sum(map(len, gone.values()))
    assert report.removed == carried
    assert (report.documents, report.copies) == (sum(before.values()), total - report.removed)
    assert {uri: files_of(Path(uri)) for uri in uris} == bytes_before
    assert np.array_equal(
        open_corpus(str(folder / "merged")).manifest.unigram, sum(part.manifest.unigram for part in parts)
    )


@pytest.fixture(params=[False, True], ids=["json", "columns"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of blocks in the manifest, or apart as in a large corpus."""
    if request.param:
        monkeypatch.setattr(manifest_file, "MIN_BLOCKS_STORED_APART", 1)


@pytest.mark.long
@pytest.mark.usefixtures("form")
def test_a_stream_reads_the_parts_and_no_removed_text(tmp_path: Path) -> None:
    blocks = [random_block(seed, 400) for seed in range(6)]
    uris = [
        write_corpus(tmp_path / n, blocks[at : at + 2], [random_block(9 + at, 200)]) for n, at in (("a", 0), ("b", 2))
    ]
    uris.append(write_corpus(tmp_path / "c", [blocks[0], blocks[4]], [random_block(20, 200)]))
    merge(uris, tmp_path / "merged")
    at_once = write_corpus(tmp_path / "once", [*blocks[:4], blocks[0], blocks[4]])
    source = source_of(str(tmp_path / "merged"))
    state = load_removals(open_corpus(source.uri).store, open_corpus(source.uri).manifest).digest
    plain = Stream(spec_of(source))
    whole = plain.read(0, 0, plain.samples_per_epoch)
    fields = {"manifest_fingerprint": source.manifest_fingerprint}
    expected = Stream(spec_of(source_of(at_once)))
    assert plain.samples_per_epoch == expected.samples_per_epoch
    assert len(whole.tokens) == len(expected.read(0, 0, expected.samples_per_epoch).tokens)
    hollow = Stream(spec_of(source.model_copy(update={"removals": state, **fields})))
    holes = hollow.read(0, 0, hollow.samples_per_epoch).holes
    assert holes is not None
    assert len(holes) >= len(blocks[0].tokens)  # the copy in the third part


@pytest.mark.long
@pytest.mark.usefixtures("form")
def test_built_corpora_with_provenance(tmp_path: Path) -> None:
    """Copies are known by their text, documents by their ids; `verify` names a shard of a part."""
    options = SMALL.model_copy(update={"provenance": ProvenanceOptions(id="id"), "heldout_fraction": 0.5})
    texts = {"a": DOCUMENTS[:40], "b": [*DOCUMENTS[30:], "short"]}
    for name, documents in texts.items():
        file = write_jsonl(tmp_path / f"in-{name}" / "x.jsonl", documents)
        file.write_text(file.read_text().replace('{"id": ', f'{{"id": "{name}-').replace(', "text"', '", "text"'))
        build(tmp_path / f"in-{name}", tmp_path / name, options)
    report = merge([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "merged")
    assert report.copies == 10
    merged = open_corpus(str(tmp_path / "merged"))
    assert verify_corpus(str(tmp_path / "merged")).damage == ()
    both = [one for part in ("a", "b") for one in find_documents(merged, id=f"{part}-15")]
    assert [show_documents(merged.store.uri, one.split, one.number)[0].sentences[0] for one in both] == [
        show_documents(str(tmp_path / part), found.split, found.number)[0].sentences[0]
        for part in ("a", "b")
        for found in find_documents(open_corpus(str(tmp_path / part)), id=f"{part}-15")
    ]
    assert len(documents_by_id(merged, ["a-15", "b-15"])) == 2
    with pytest.raises(BadUri):
        merged.store.put(merged.manifest.train.shards[0], b"")
    shard = tmp_path / "b" / "train/000000.tar"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    assert "parts/1/train/000000.tar" in {damage.key for damage in verify_corpus(str(tmp_path / "merged")).damage}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_removed_from_any_corpus_that_went_into_a_merged_one(tmp_path: Path, seed: int) -> None:
    """From parts, and from merged corpora of them at any depth, at any time; some of the latter are gone by the end."""
    draw = random.Random(seed)

    def leaf(name: str) -> str:
        heldout = [random_block(draw.randrange(10**6), 200)] * draw.randrange(2)
        return write_corpus(tmp_path / name, [random_block(draw.randrange(10**6), 300)], heldout)

    def take_out(uri: str) -> None:
        corpus = open_corpus(uri)
        names = [f"{split}:{n}" for split in SPLITS for n in range(int(corpus.table(split).documents.sum()))]
        found = documents_by_number(corpus, draw.sample(names, 2))
        remove_documents(corpus, found, removed_by="y", removed_at=2, reason="why")

    corpora = [leaf("0")]
    leaves, above = corpora[:], list[str]()
    for number in range(1, 5):
        leaves.append(leaf(str(number)))
        together = [above[-1] if above else leaves[0], leaves[-1]]
        draw.shuffle(together)
        merge(together, tmp_path / f"merged{number}")
        above.append(str(tmp_path / f"merged{number}"))
        for uri in draw.sample([*leaves, *above], 2):
            take_out(uri)
    newest = open_corpus(above[-1])
    expected = {text for uri in [*leaves, *above] for text in removed_texts(open_corpus(uri))}
    remove_documents(newest, find_removed_in_parts(newest), removed_by="y", removed_at=3, reason="as below")
    assert set(removed_texts(newest)) == expected
    assert len(find_unapplied_removals(newest)) == 0
    take_out(above[1])
    assert len(find_unapplied_removals(newest)) <= 2
    shutil.rmtree(above[1])
    assert len(find_unapplied_removals(newest)) == 0
    shutil.rmtree(leaves[2])
    with pytest.raises(CorpusError):
        find_unapplied_removals(newest)


def removed_texts(corpus: Corpus) -> list[tuple[int, ...]]:
    return [
        [document for block in read(corpus, split) for document in block][number]
        for split in SPLITS
        for number in removed(corpus, split)
    ]


@pytest.mark.long
def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "one", [random_block(1, 300)], [random_block(2, 200)])
    same = write_corpus(tmp_path / "same", [random_block(3, 300)], [random_block(4, 200)])
    pairs = write_corpus(tmp_path / "pairs", [random_block(5, 300)], [random_block(6, 200)], negatives=0)
    for uris in ([one], [one, one], [one, pairs]):
        with pytest.raises(CorpusError):
            merge(uris, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    merge([one, same], tmp_path / "out")
    with pytest.raises(CorpusError):
        merge([same, one], tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    store = open_corpus(one).store
    (tmp_path / "other").mkdir()
    (tmp_path / "other/build").mkdir()
    (tmp_path / "other" / CONFIGURATION_KEY).write_text("{}")
    with pytest.raises(CorpusError):
        merge([one, same], tmp_path / "other")
    assert store.size(MANIFEST_KEY)


def test_a_complete_merge_is_known(tmp_path: Path) -> None:
    """Whoever killed it may have done so after its last byte: the same command says the same again."""
    one = write_corpus(tmp_path / "one", [random_block(1, 300)], [random_block(2, 200)])
    two = write_corpus(tmp_path / "two", [random_block(1, 300)], [random_block(4, 200)])
    remove_documents(
        open_corpus(one),
        documents_by_number(open_corpus(one), ["1"]),
        removed_by="y",
        removed_at=2,
        reason="later",
    )
    report = merge([one, two], tmp_path / "out")
    assert report.copies
    assert report.removed == 1
    merged = open_corpus(str(tmp_path / "out"))
    remove_documents(merged, documents_by_number(merged, ["2"]), removed_by="y", removed_at=3, reason="later still")
    merged.store.put(CONFIGURATION_KEY, b"{}")
    assert merge([one, two], tmp_path / "out") == report
    assert merged.store.size(CONFIGURATION_KEY) is None
    remove_documents(
        open_corpus(two),
        documents_by_number(open_corpus(two), ["0"]),
        removed_by="y",
        removed_at=4,
        reason="since",
    )
    with pytest.raises(CorpusError):  # the merged corpus does not know of it
        merge([one, two], tmp_path / "out")
