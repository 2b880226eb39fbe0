"""Near duplicates of held-out documents are held out, too: whole clusters, over all corpora of one preparation."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.corpus.corpus import SPLITS, open_corpus
from data_service.corpus.manifest import CorpusManifest
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.merge import merge_corpora
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.removals import load_removals
from data_service.errors import InputError
from data_service.ingest.build import build_corpus
from data_service.ingest.heldout import heldout_options_from_manifest
from data_service.ingest.heldout_overlap import rules_exclude_overlap
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Progress
from data_service.prepare.configuration import Preparation
from data_service.prepare.documents import Document, RowsWriter, kept_schema
from data_service.prepare.statistics import Statistics
from data_service.store.open import open_store
from tests.support.data.preparations import made_up_texts, run, with_word_changed, write_texts
from tests.support.data.raw_text import build, ignore_progress, origins_of, tokenizer_folder

MARKED = {"stage": "near_duplicates", "keep": "all"}
OPTIONS = BuildOptions(
    split_bytes=50_000, block_tokens=4_000, heldout_fraction=0.2, provenance=ProvenanceOptions(id="id")
)


def near_copies(seed: int, count: int = 240, length: int = 60) -> tuple[list[str], list[str]]:
    """The texts of two sources; the second holds near copies of the first's, and texts of its own."""
    drawn = random.Random(seed)
    texts = made_up_texts(count, length, drawn)
    first = [*texts[: count // 2], *(with_word_changed(text, drawn) for text in texts[: count // 6])]
    second = [with_word_changed(text, drawn) for text in texts[count // 12 : count // 3] for _ in range(2)]
    return first, [*second, *texts[count // 2 :], texts[0]]


def prepared(
    folder: Path, sources: Sequence[list[str]], stages: Sequence[dict[str, Any]] = (MARKED,), workers: int = 1
) -> Statistics:
    inputs = [write_texts(folder / f"{number}.jsonl", texts) for number, texts in enumerate(sources)]
    return run(inputs, stages, folder / "prepared", workers=workers)


def built(folder: Path, name: str, inputs: Sequence[Path], options: BuildOptions = OPTIONS) -> CorpusManifest:
    tokenizer = tokenizer_folder(folder / "tokenizer")
    return build_corpus([str(path) for path in inputs], str(folder / name), tokenizer, options, ignore_progress)


def ids_of(folder: Path, names: Sequence[str]) -> tuple[set[str], set[str]]:
    """The ids of what is trained on and of what is held out, in all of these corpora."""
    found: tuple[set[str], set[str]] = (set(), set())
    for name in names:
        corpus = open_corpus(str(folder / name))
        for ids, split in zip(found, SPLITS, strict=True):
            ids.update(row.provenance.id or "" for row in origins_of(corpus, split))
    return found


def cluster_of(folder: Path) -> dict[str, str]:
    """Of each document its cluster, which is itself if it has no near duplicate."""
    rows = pq.read_table(folder / "prepared/documents").to_pylist()
    return {row["id"]: row["cluster"] or row["id"] for row in rows}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_no_training_document_shares_a_cluster_with_one_held_out(tmp_path: Path, seed: int) -> None:
    prepared(tmp_path, near_copies(seed))
    parts = sorted((tmp_path / "prepared/documents").iterdir())
    clusters = cluster_of(tmp_path)
    assert len(parts) > 4
    whole = built(tmp_path, "whole", [tmp_path / "prepared"])
    rule = built(tmp_path, "one", parts[::2]).heldout_rule
    assert rule is not None
    like = OPTIONS.model_copy(update={"heldout_rule": rule})
    assert whole.heldout_rule is not None
    assert built(tmp_path, "other", parts[1::2], like).heldout_rule == rule
    assert replace(rule, by_tokens=whole.heldout_rule.by_tokens) == whole.heldout_rule
    for names in (["whole"], ["one", "other"]):
        trained, held = ids_of(tmp_path, names)
        assert not {clusters[one] for one in trained} & {clusters[one] for one in held}
        assert sum(list(clusters.values()).count(clusters[one]) > 1 for one in held) > 40
    # Without the clusters' names near copies of what is held out are trained on.
    for part in parts:
        table = pq.read_table(part).drop_columns(["cluster"]).replace_schema_metadata(None)
        (tmp_path / "plain").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "plain" / part.name)
    built(tmp_path, "without", [tmp_path / "plain"])
    trained, held = ids_of(tmp_path, ["without"])
    assert len({clusters[one] for one in trained} & {clusters[one] for one in held}) > 10


def without_clusters(part: Path) -> None:
    """Write a prepared file again without the names of its clusters, as many bytes as before."""
    table, size = pq.read_table(part), part.stat().st_size
    place = table.schema.get_field_index("cluster")
    field = table.schema.field(place)
    table = table.set_column(place, field, pa.nulls(len(table), field.type))
    pq.write_table(table, part, compression="zstd")
    content = part.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    part.write_bytes(content[:footer].ljust(footer + size - len(content), b"\0") + content[footer:])
    assert part.stat().st_size == size


def test_documents_that_lose_their_clusters_between_the_passes_are_noticed(tmp_path: Path) -> None:
    prepared(tmp_path, near_copies(seed=5, count=48))
    parts = sorted((tmp_path / "prepared/documents").iterdir())

    def forget_clusters(progress: Progress) -> None:
        if progress.stage == "writing" and not progress.done:
            for part in parts:
                without_clusters(part)

    with pytest.raises(InputError, match="changed"):
        build(tmp_path / "prepared", tmp_path / "corpus", OPTIONS, forget_clusters)
    assert not (tmp_path / "corpus/manifest.json").exists()


@pytest.mark.parametrize("seed", range(4))
def test_any_clusters_and_copies_the_first_of_equal_texts_stays_and_clusters_stay_whole(
    tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    texts = made_up_texts(drawn.randint(60, 150), drawn.randint(10, 60), drawn)
    names = [None, None, *(f"c{number}" for number in range(drawn.randint(1, 60)))]
    rows = [
        Document(str(number), drawn.choice(texts), "s", cluster=drawn.choice(names))
        for number in range(drawn.randint(150, 300))
    ]
    cuts = sorted(drawn.sample(range(1, len(rows)), 3))
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        writer = RowsWriter(kept_schema("any"))
        for row in rows[start:stop]:
            writer.add(row)
        writer.store(open_store(str(tmp_path / "in")), f"{number}.parquet")
    fraction = drawn.choice((0.05, 0.2, 0.5))
    built(tmp_path, "out", [tmp_path / "in"], OPTIONS.model_copy(update={"heldout_fraction": fraction}))
    trained, held = ids_of(tmp_path, ["out"])
    first = {row.text: row.id for row in reversed(rows)}
    assert trained | held == set(first.values())
    assert trained
    assert held
    assert not trained & held
    of = {row.id: row.cluster for row in rows if row.cluster}
    assert not {of[one] for one in trained if one in of} & {of[one] for one in held if one in of}


@pytest.mark.long
def test_stretches_are_held_out_only_of_documents_without_near_duplicates(tmp_path: Path) -> None:
    drawn = random.Random(3)
    texts = ["\n\n".join(made_up_texts(40, 30, drawn)) for _ in range(5)]
    copies = [with_word_changed(texts[number], drawn) for number in (0, 1, 1)]
    prepared(tmp_path, [texts, copies])
    options = OPTIONS.model_copy(update={"heldout_fraction": 0.001, "split_bytes": 1 << 20})
    manifest = built(tmp_path, "corpus", [tmp_path / "prepared"], options)
    assert manifest.heldout_rule is not None
    assert manifest.heldout_rule.unit == "stretch"
    _, held = ids_of(tmp_path, ["corpus"])
    assert held
    assert held <= {"0-2", "0-3", "0-4"}


def test_few_documents_that_are_all_near_duplicates_are_refused(tmp_path: Path) -> None:
    drawn = random.Random(4)
    text = "\n\n".join(made_up_texts(40, 30, drawn))
    prepared(tmp_path, [[text, with_word_changed(text, drawn)]])
    with pytest.raises(InputError):
        built(tmp_path, "corpus", [tmp_path / "prepared"])


@pytest.mark.long
def test_documents_that_were_not_prepared_together_are_refused(tmp_path: Path) -> None:
    first, second = near_copies(7, 120)
    prepared(tmp_path / "a", [first])
    prepared(tmp_path / "b", [second])
    (tmp_path / "plain.jsonl").write_text('{"text": "A text.", "id": "x"}\n')
    folders = [tmp_path / "a/prepared", tmp_path / "b/prepared", tmp_path / "plain.jsonl"]
    for one, other in ((0, 1), (0, 2), (2, 1)):
        with pytest.raises(InputError) as refused:
            built(tmp_path, "mixed", [folders[one], folders[other]])
        assert all(str(folders[number]) in str(refused.value) for number in (one, other))


@pytest.mark.long
def test_text_that_was_not_prepared_with_a_corpus_can_be_added_to_it(tmp_path: Path) -> None:
    first, second = near_copies(7, 240)
    prepared(tmp_path / "a", [first])
    prepared(tmp_path / "b", [second])
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": f"x{i}"}) + "\n" for i, text in enumerate([*first, *second]))
    )
    old = built(tmp_path, "old", [tmp_path / "a/prepared"])
    assert old.heldout_rule is not None
    for name, place in (("b", tmp_path / "b/prepared"), ("plain", tmp_path / "plain.jsonl")):
        like = heldout_options_from_manifest(old)
        new = built(tmp_path, f"new-{name}", [place], OPTIONS.model_copy(update=like))
        assert new.effective_heldout_rule.below == old.effective_heldout_rule.below
        assert not rules_exclude_overlap(old, new)
        assert not rules_exclude_overlap(new, old)
    merged_at = str(tmp_path / "merged")
    merge_corpora([str(tmp_path / "old"), str(tmp_path / "new-plain")], merged_at, removed_by="me", removed_at=1)
    merged = load_manifest(open_store(merged_at))
    assert merged.effective_heldout_rule.below == old.effective_heldout_rule.below
    assert merged.effective_heldout_rule.clusters not in ("", old.effective_heldout_rule.clusters)
    _, held = ids_of(tmp_path, ["old"])
    gone = load_removals(open_store(merged_at), merged)
    of_new = int(old.train.documents.sum()), int(merged.train.documents.sum())
    copies = {
        number for number in gone.removed_documents("train").documents.tolist() if of_new[0] <= number < of_new[1]
    }
    assert held
    assert len(copies) > len(first) / 2


@pytest.mark.long
def test_a_file_that_lost_the_names_of_its_clusters_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path, near_copies(8, 60))
    part = next((tmp_path / "prepared/documents").iterdir())
    pq.write_table(pq.read_table(part).drop_columns(["cluster"]), tmp_path / "lost.parquet")
    with pytest.raises(InputError, match=r"lost\.parquet"):
        built(tmp_path, "corpus", [tmp_path / "lost.parquet"])


@pytest.mark.long
def test_all_documents_are_kept_with_the_name_of_their_cluster(tmp_path: Path) -> None:
    first, second = near_copies(9, 120)
    statistics = prepared(tmp_path / "all", [first, second])
    prepared(tmp_path / "first", [first, second], [{"stage": "near_duplicates"}])
    rows = pq.read_table(tmp_path / "all/prepared/documents").to_pylist()
    assert [row["text"] for row in rows] == [*first, *second]
    assert {row["cluster_size"] for row in rows} == {1}
    members = [row for row in rows if row["cluster"] is not None]
    assert statistics.stages[-1].clustered == len(members)
    assert len(members) > 30
    dropped = pq.read_table(tmp_path / "first/prepared/dropped").to_pylist()
    expected = {row["id"]: row["detail"].removeprefix("near copy of ") for row in dropped}
    assert {row["id"]: row["cluster"] for row in members} == expected | {name: name for name in expected.values()}


@pytest.mark.long
def test_a_manifest_says_the_clusters_by_which_text_was_held_out(tmp_path: Path) -> None:
    prepared(tmp_path, near_copies(11, 120))
    manifest = built(tmp_path, "corpus", [tmp_path / "prepared"])
    data = (tmp_path / "corpus/manifest.json").read_bytes()
    assert b'"clusters":' in data
    assert load_manifest(open_store(str(tmp_path / "corpus"))).heldout_rule == manifest.heldout_rule
    again = built(tmp_path, "corpus", [tmp_path / "prepared"])
    assert again.digest == load_manifest(open_store(str(tmp_path / "corpus"))).digest
    table = pa.table({"text": made_up_texts(60, 40, random.Random(1)), "id": [str(i) for i in range(60)]})
    table = table.append_column("cluster", pa.array(["topic"] * 60))
    pq.write_table(table, tmp_path / "own.parquet")  # a column of the user's own means nothing
    plain = built(tmp_path, "plain", [tmp_path / "own.parquet"])
    assert b'"clusters":' not in (tmp_path / "plain/manifest.json").read_bytes()
    assert plain.heldout.tokens.sum() > 0


def test_two_stages_that_name_clusters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="near_duplicates"):
        Preparation.model_validate({"inputs": [{"source": "a", "files": ["a"]}], "stages": [MARKED, MARKED]})


def test_settings_without_keep_are_stored_as_before() -> None:
    stages = [{"stage": "near_duplicates", "keep": "first"}, {"stage": "near_duplicates"}]
    made = Preparation.model_validate({"inputs": [{"source": "a", "files": ["a"]}], "stages": stages})
    assert made.model_dump(mode="json")["stages"] == [{"stage": "near_duplicates", "similarity": 0.8, "words": 5}] * 2
