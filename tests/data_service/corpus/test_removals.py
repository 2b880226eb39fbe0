"""What is taken out of a corpus stands in a list that cannot be changed unnoticed; all else stays as it was."""

import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.corpus import (
    SPLITS,
    Corpus,
    locate_document_tokens,
    open_corpus,
    show_documents,
    verify_corpus,
)
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.reader import read_block
from data_service.corpus.removals import (
    HEAD_KEY,
    REMOVALS_FOLDER,
    RemovalChain,
    append_removal,
    load_removals,
    load_removals_up_to,
    removal_key,
)
from data_service.corpus.remove import documents_by_id, documents_by_number, remove_documents
from data_service.errors import CorpusError
from data_service.store.base import Store
from data_service.store.open import open_store
from tests.support.data.corpora import random_block, write_corpus
from tests.support.data.raw_text import DOCUMENTS, SMALL, build, files_of

SIZES = {"train": (400, 250, 610), "heldout": (120, 300)}


def corpus_at(folder: Path) -> Corpus:
    train, heldout = ([random_block(size, size) for size in SIZES[part]] for part in SPLITS)
    return open_corpus(write_corpus(folder, train, heldout))


def names_of(corpus: Corpus) -> list[str]:
    return [f"{part}:{n}" for part in SPLITS for n in range(int(corpus.table(part).documents.sum()))]


def remove(corpus: Corpus, names: list[str], reason: str = "asked for") -> int | None:
    found = documents_by_number(corpus, names)
    return remove_documents(corpus, found, removed_by="somebody@here", removed_at=7, reason=reason).number


def chain_of(corpus: Corpus) -> RemovalChain:
    return load_removals(corpus.store, corpus.manifest)


def removed_names(chain: RemovalChain) -> set[str]:
    return {f"{part}:{n}" for part in SPLITS for n in chain.removed_documents(part).documents.tolist()}


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_removals_add_up_and_nothing_else_changes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    corpus = corpus_at(tmp_path_factory.mktemp("corpus"))
    before, gone, states = files_of(Path(corpus.store.uri)), set[str](), [chain_of(corpus)]
    for wanted in data.draw(st.lists(st.sets(st.sampled_from(names_of(corpus)), min_size=1, max_size=9), max_size=4)):
        written = [name.removeprefix("train:") if data.draw(st.booleans()) else name for name in wanted]
        number = remove(corpus, written)
        assert (number is None) == (wanted <= gone)
        gone |= wanted
        chain = chain_of(corpus)
        assert removed_names(chain) == gone
        if number is not None:
            assert number == len(states) == len(chain.removals)
            states.append(chain)
    for state in states:
        assert load_removals_up_to(corpus.store, corpus.manifest, state.digest).digest == state.digest
    for part in SPLITS:
        removed, table = states[-1].removed_documents(part), corpus.table(part)
        places = zip(removed.block.tolist(), removed.start.tolist(), removed.stop.tolist(), strict=True)
        for number, place in zip(removed.documents.tolist(), places, strict=True):
            assert place == locate_document_tokens(corpus, part, number)
        for block in range(len(table)):
            of_block = {tuple(pair) for pair in removed.token_ranges(block).tolist()}
            mine = removed.block == block
            assert of_block == set(zip(removed.start[mine].tolist(), removed.stop[mine].tolist(), strict=True))
    after = files_of(Path(corpus.store.uri))
    assert {name: after[name] for name in before} == before
    assert all(name.startswith(REMOVALS_FOLDER) for name in set(after) - set(before))
    assert verify_corpus(corpus.store.uri).damage == ()


@pytest.fixture(scope="module")
def removed_from(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus with four removals. Nothing changes it."""
    corpus = corpus_at(tmp_path_factory.mktemp("removed"))
    for names in (["3", "heldout:1"], ["0"], ["17", "18", "19"], ["heldout:2"]):
        remove(corpus, names, reason="because of " + names[0])
    return corpus


@pytest.mark.long
def test_any_change_of_the_list_is_found_with_its_place(removed_from: Corpus, tmp_path: Path) -> None:
    files = {k: v for k, v in files_of(Path(removed_from.store.uri)).items() if k.startswith(REMOVALS_FOLDER)}
    store, manifest, whole = open_store(tmp_path), removed_from.manifest, chain_of(removed_from)
    keys = [removal_key(number) for number in range(1, 5)]
    rng = random.Random(1)

    def found(changed: Mapping[str, bytes | None]) -> str | None:
        """The message about these files in place of those that are there; None if the list is as it was."""
        for key, data in {**files, **changed}.items():
            store.delete(key) if data is None else store.put(key, data)
        try:
            assert load_removals(store, manifest).digest == whole.digest
        except CorpusError as error:
            return error.problem
        return None

    assert found({}) is None
    for key in keys:
        assert key in str(found({key: None}))
        for _ in range(12):
            place, other = rng.randrange(len(files[key])), rng.randrange(1, 256)
            data = bytearray(files[key])
            data[place] ^= other
            assert f"{key} " in str(found({key: bytes(data)}))
        assert key in str(found({key: files[key][: rng.randrange(len(files[key]))]}))
    for first, other in ((0, 1), (1, 3), (2, 3)):
        swapped = {keys[first]: files[keys[other]], keys[other]: files[keys[first]]}
        assert keys[first] in str(found(swapped))
        renamed = {keys[first]: files[keys[other]]}
        assert f"{REMOVALS_FOLDER}0000" in str(found(renamed))
    assert removal_key(3) in str(found({keys[2]: None, keys[3]: None}))  # the end is missed, by the head
    head = json.loads(files[HEAD_KEY])
    for number in range(1, 4):
        assert removal_key(number) in str(found({HEAD_KEY: json.dumps(head | {"count": number}).encode()}))
    assert HEAD_KEY in str(found({HEAD_KEY: b"{}"}))
    assert found({HEAD_KEY: None}) is None  # a remover was killed before it wrote it
    assert "removals/x" in str(found({f"{REMOVALS_FOLDER}x": b""}))


def test_verify_names_what_is_wrong_with_the_list(removed_from: Corpus, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for key, data in files_of(Path(removed_from.store.uri)).items():
        (copy / key).parent.mkdir(parents=True, exist_ok=True)
        (copy / key).write_bytes(data)
    assert verify_corpus(str(copy)).damage == ()
    (copy / removal_key(2)).unlink()
    (damage,) = verify_corpus(str(copy)).damage
    assert damage.key == removal_key(2)


def test_a_list_of_another_corpus_is_refused(removed_from: Corpus, tmp_path: Path) -> None:
    other = open_corpus(write_corpus(tmp_path, [random_block(1, 2000)], [random_block(2, 2000)]))
    other.store.put(removal_key(1), removed_from.store.get(removal_key(1)))
    with pytest.raises(CorpusError) as caught:
        chain_of(other)
    assert removed_from.manifest.digest[:12] in caught.value.problem


def test_a_state_that_never_was_is_refused(removed_from: Corpus) -> None:
    with pytest.raises(CorpusError) as caught:
        load_removals_up_to(removed_from.store, removed_from.manifest, "feed" * 16)
    assert "feedfeed" in caught.value.problem
    assert load_removals_up_to(removed_from.store, removed_from.manifest, "") == RemovalChain()


def test_several_at_the_same_time_remove_each_document_once(tmp_path: Path) -> None:
    corpus, rng = corpus_at(tmp_path), random.Random(3)
    wanted = [rng.sample(names_of(corpus), 8) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        numbers = list(threads.map(lambda names: remove(corpus, names), wanted))
    chain = chain_of(corpus)
    assert sorted(n for n in numbers if n is not None) == list(range(1, len(chain.removals) + 1))
    assert removed_names(chain) == {name for names in wanted for name in names}
    assert sum(map(len, chain.removals)) == len(removed_names(chain))


@pytest.mark.parametrize("name", ["17x", "-1", "train:", "test:3", "heldout:99999", "1" * 30, " 3", "٣"])
def test_what_is_no_document_is_refused_with_its_name(removed_from: Corpus, name: str) -> None:
    with pytest.raises(CorpusError) as caught:
        documents_by_number(removed_from, ["1", name])
    assert repr(name) in caught.value.problem


@pytest.mark.long
def test_by_id(tmp_path: Path) -> None:
    lines = [json.dumps({"docid": f"ü {n}", "text": text}) for n, text in enumerate(DOCUMENTS[:40])]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines), "utf-8")
    build(
        tmp_path / "in",
        tmp_path / "c",
        SMALL.model_copy(update={"provenance": ProvenanceOptions(id="docid")}),
    )
    corpus, done = open_corpus(str(tmp_path / "c")), list[int]()
    found = documents_by_id(corpus, ["ü 3", "ü 21", "ü 3"], lambda more, total: done.append(total))
    assert done == [len(corpus.manifest.provenance)] * len(corpus.manifest.provenance)
    assert remove_documents(corpus, found, removed_by="x", removed_at=1, reason="r").number == 1
    tokenizer, texts = corpus.tokenizer(), dict[str, str]()
    for part in SPLITS:
        for index in range(int(corpus.table(part).documents.sum())):
            (document,) = show_documents(corpus.store.uri, part, index)
            assert (document.removal is not None) == (document.sentences == ())
            if document.removal:
                block, start, stop = locate_document_tokens(corpus, part, index)
                tokens = read_block(corpus.store, corpus.table(part), block).tokens[start:stop]
                texts[f"{part}:{index}"] = "".join(tokenizer.decode(tokens).split())
    assert set(texts) == removed_names(chain_of(corpus))
    assert sorted(texts.values()) == sorted("".join(DOCUMENTS[n].split()) for n in (3, 21))
    before = files_of(tmp_path / "c")
    with pytest.raises(CorpusError) as caught:
        documents_by_id(corpus, ["ü 4", "nobody's", "ü 40"])
    assert all(repr(name) in caught.value.problem for name in ("nobody's", "ü 40"))
    assert files_of(tmp_path / "c") == before


def test_without_provenance_there_are_no_ids(removed_from: Corpus) -> None:
    with pytest.raises(CorpusError):
        documents_by_id(removed_from, ["a"])


def test_without_a_reason_nothing_is_removed(removed_from: Corpus) -> None:
    with pytest.raises(CorpusError):
        remove(removed_from, ["5"], reason=" \n")
    assert len(chain_of(removed_from).removals) == 4


def test_the_list_is_the_same_in_any_store(any_store: Store, removed_from: Corpus) -> None:
    manifest, chain = removed_from.manifest, RemovalChain()
    for removal in chain_of(removed_from).removals:
        before, longer = chain, append_removal(any_store, manifest, chain, removal)
        assert longer is not None
        chain = longer
        assert append_removal(any_store, manifest, before, removal) is None  # one was first
    assert load_removals(any_store, manifest).digest == chain_of(removed_from).digest
    any_store.delete(removal_key(4))
    with pytest.raises(CorpusError) as caught:
        load_removals(any_store, manifest)
    assert removal_key(4) in caught.value.problem
