"""The data card states what can be counted in the documents themselves, and claims nothing of others."""

import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_service.corpus.corpus import open_corpus
from data_service.corpus.data_card import make_card, render_markdown
from data_service.corpus.manifest import MANIFEST_KEY
from data_service.corpus.merge import merge_corpora
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.remove import documents_by_id, remove_documents
from data_service.errors import CorpusError, InputError
from data_service.ingest.build import build_corpus
from data_service.ingest.file_kinds import PREPARED_DOCUMENTS_PREFIX, STATISTICS_KEY
from data_service.prepare.configuration import Preparation
from data_service.prepare.contamination import EvaluationText, build_index, dump_index
from data_service.prepare.prepare import prepare
from tests.support.data.raw_text import DOCUMENTS, SMALL, ignore_progress, tokenizer_folder, write_jsonl

OPTIONS = SMALL.model_copy(
    update={
        "provenance": ProvenanceOptions(
            id="id", source="source", licence="licence", language="language", may_lack=("licence", "language")
        )
    }
)
LICENCES = (None, "MIT", "CC0 | 1.0", "<b>own</b>")


def index_of(path: Path, *splits: str) -> dict[str, Any]:
    """A stage that looks for texts of splits, each a passage of another document."""
    texts = [EvaluationText(split, 0, DOCUMENTS[50 + n][100:400]) for n, split in enumerate(splits)]
    content = dump_index(build_index(texts))
    path.write_bytes(content)
    return {"stage": "decontaminate", "index": str(path), "sha256": hashlib.sha256(content).hexdigest()}


def prepared(folder: Path, name: str, texts: list[str], stages: list[dict[str, Any]]) -> Path:
    """Texts of two sources, prepared."""
    draw = random.Random(name)
    inputs = []
    for source in ("web", "books"):
        lines = [
            {"text": text, "id": f"{name}-{source}-{n}", "licence": draw.choice(LICENCES), "language": "en"}
            for n, text in enumerate(texts[source == "books" :: 2])
        ]
        path = folder / f"{name}-{source}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fields = {"id": "id", "licence": "licence", "language": "language"}
        inputs.append({"source": source, "files": [str(path)], "fields": fields})
    made = Preparation.model_validate({"inputs": inputs, "stages": stages, "chunk_bytes": 1 << 15})
    prepare(made, str(folder / name), 1, ignore_progress)
    return folder / name


def build(folder: Path, out: str, *inputs: Path, options: Any = OPTIONS) -> str:
    tokenizer = tokenizer_folder(folder / "tokenizer")
    build_corpus([str(one) for one in inputs], str(folder / out), tokenizer, options, ignore_progress)
    return str(folder / out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two outputs of `prepare`, searched for `a/dev` and `b/dev`, and for `b/dev` and `c/test`."""
    folder = tmp_path_factory.mktemp("card")
    first = index_of(folder / "first.ngrams", "a/dev", "b/dev")
    prepared(folder, "one", DOCUMENTS[:60], [{"stage": "length", "least_words": 90}, first])
    second = index_of(folder / "second.ngrams", "x/x", "b/dev", "c/test")
    prepared(folder, "two", DOCUMENTS[60:90], [second])
    build(folder, "corpus", folder / "one")
    build(folder, "both", folder / "one", folder / "two")
    return folder


@pytest.mark.long
def test_counts_are_those_of_the_documents(folder: Path) -> None:
    corpus = open_corpus(str(folder / "corpus"))
    (built,) = make_card(corpus).built
    assert built.origin is not None
    rows = [
        row
        for path in (folder / "corpus" / "provenance" / "train").iterdir()
        for row in pq.read_table(path).to_pylist()
    ]
    for field in ("source", "licence", "language"):
        documents = Counter(row[field] or "" for row in rows)
        tokens: Counter[str] = Counter()
        for row in rows:
            tokens[row[field] or ""] += row["tokens"]
        expected = {value: (documents[value], tokens[value]) for value in documents}
        assert built.origin.values[field] == expected
    (found,) = built.origin.prepared
    statistics = json.loads((folder / "one" / STATISTICS_KEY).read_bytes())
    assert [stage.model_dump() for stage in found.stages] == statistics["stages"]
    assert found.digest == hashlib.sha256((folder / "one" / STATISTICS_KEY).read_bytes()).hexdigest()
    assert {name: one.documents for name, one in found.sources.items()} == {
        name: one["documents_kept"] for name, one in statistics["sources"].items()
    }
    dropped = sum(sum(stage.dropped.values()) for stage in found.stages)
    assert found.documents_read == found.documents_kept + dropped
    assert found.stages[-1].dropped == {"a/dev": 1, "b/dev": 1}


def splits(uri: str) -> list[str]:
    return [split.split for split in make_card(open_corpus(uri)).searched_splits]


@pytest.mark.long
def test_a_split_counts_as_searched_for_if_all_text_was(folder: Path, tmp_path: Path) -> None:
    assert splits(str(folder / "corpus")) == ["a/dev", "b/dev"]
    assert splits(str(folder / "both")) == ["b/dev"]
    other = index_of(tmp_path / "other.ngrams", "b/dev")  # other texts of the same name
    prepared(tmp_path, "third", DOCUMENTS[60:90], [other])
    assert splits(build(tmp_path, "joined", folder / "one", tmp_path / "third")) == []
    raw = write_jsonl(tmp_path / "raw.jsonl", DOCUMENTS[90:100])
    lacks = ProvenanceOptions(id="id", source="source", licence="licence", may_lack=("source", "licence"))
    mixed = build(tmp_path, "mixed", folder / "one", raw, options=OPTIONS.model_copy(update={"provenance": lacks}))
    assert splits(mixed) == []
    (part,) = make_card(open_corpus(mixed)).built
    assert part.origin is not None
    assert (len(part.origin.prepared), part.origin.unprepared) == (1, 1)


@pytest.mark.long
def test_a_merged_corpus_claims_what_all_parts_do(folder: Path, tmp_path: Path) -> None:
    same = index_of(tmp_path / "same.ngrams", "a/dev")
    rule = open_corpus(str(folder / "corpus")).manifest.heldout_rule
    options = OPTIONS.model_copy(update={"heldout_rule": rule})
    part = build(tmp_path, "part", prepared(tmp_path, "third", DOCUMENTS[60:90], [same]), options=options)
    merge_corpora([str(folder / "corpus"), part], str(tmp_path / "merged"), removed_by="me", removed_at=0)
    assert splits(str(tmp_path / "merged")) == ["a/dev"]
    card = make_card(open_corpus(str(tmp_path / "merged")))
    assert [one.uri for one in card.built] == [str(folder / "corpus"), part]
    shutil.rmtree(part)
    build(tmp_path, "part", tmp_path / "third", options=OPTIONS.model_copy(update={"block_tokens": 500}))
    with pytest.raises(CorpusError):
        make_card(open_corpus(str(tmp_path / "merged")))


def test_a_file_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    place = prepared(tmp_path, "third", DOCUMENTS[:30], [])
    stored = sorted((place / PREPARED_DOCUMENTS_PREFIX).iterdir())
    pq.write_table(pq.read_table(stored[0]), place / PREPARED_DOCUMENTS_PREFIX / "999999.parquet")
    with pytest.raises(InputError, match=r"999999\.parquet"):
        build(tmp_path, "refused", place)
    (place / PREPARED_DOCUMENTS_PREFIX / "999999.parquet").unlink()
    pq.write_table(pq.read_table(stored[0]).slice(1), stored[0])
    with pytest.raises(InputError, match=stored[0].name):
        build(tmp_path, "refused", place)
    (place / STATISTICS_KEY).write_text("{}")
    with pytest.raises(InputError, match=STATISTICS_KEY):
        build(tmp_path, "refused", place)


@pytest.mark.long
def test_the_page_is_plain_markdown_and_tells_of_removals(folder: Path, tmp_path: Path) -> None:
    uri = build(tmp_path, "removed", folder / "one")
    corpus = open_corpus(uri)
    first = pq.read_table(tmp_path / "removed" / "provenance" / "train").to_pylist()[0]
    before = render_markdown(make_card(corpus), "a | b")
    gone = documents_by_id(corpus, [str(first["id"])])
    remove_documents(corpus, gone, removed_by="me", removed_at=0, reason="asked | for\n# it")
    card = make_card(open_corpus(uri))
    page = render_markdown(card, "a | b", level=3)
    assert "asked" not in before
    assert "| 1970-01-01 00:00 UTC | 1 |" in page
    assert "<b>" not in page
    heads = [line for line in page.splitlines() if line.startswith("#")]
    assert heads[0].startswith("### a")
    assert not any(line.startswith(("# ", "## ")) for line in heads)
    tables = [line for line in page.replace("\\|", "").splitlines() if line.startswith("|")]
    widths = [line.count("|") for line in tables]
    for line, width, following in zip(tables, widths, widths[1:], strict=False):
        assert width == following or not line.startswith("|---")


def test_a_corpus_of_plain_files_says_nothing(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "raw.jsonl", DOCUMENTS[:20])
    manifest = open_corpus(build(tmp_path, "plain", raw, options=SMALL)).manifest
    assert manifest.origin is None
    assert b'"version":6,' in (tmp_path / "plain" / MANIFEST_KEY).read_bytes()[:60]
    assert not make_card(open_corpus(str(tmp_path / "plain"))).has_facts_beyond_inputs
