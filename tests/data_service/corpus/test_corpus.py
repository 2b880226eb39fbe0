"""Whatever byte of a corpus is flipped, cut off or added, `verify_corpus` says which file and which part of it."""

from pathlib import Path

import pytest

from data_service.corpus.corpus import verify_corpus
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.provenance import ProvenanceOptions
from data_service.errors import CorpusError
from data_service.store.open import open_store
from tests.support.data.raw_text import DOCUMENTS, SMALL, build, files_of, write_jsonl


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_jsonl(folder / "inputs/a.jsonl", DOCUMENTS)
    options = SMALL.model_copy(update={"provenance": ProvenanceOptions(id="id")})
    build(folder / "inputs", folder / "corpus", options)
    return folder / "corpus"


def damage_of(corpus: Path) -> list[str]:
    return [str(damage) for damage in verify_corpus(str(corpus)).damage]


@pytest.mark.long
def test_a_sound_corpus_has_no_damage(corpus: Path) -> None:
    report = verify_corpus(str(corpus))
    assert report.damage == ()
    assert report.bytes == sum(
        len(data) for name, data in files_of(corpus).items() if name.endswith((".tar", ".parquet"))
    )
    assert report.blocks > 5


@pytest.mark.long
def test_a_flipped_byte_in_any_part_of_any_file_is_named(corpus: Path) -> None:
    manifest = load_manifest(open_store(corpus))
    blocks = {
        (
            table.block_shard_key(i),
            int(table.offset[i]),
        ): f"bytes {table.offset[i]} to {table.offset[i] + table.length[i]}"
        for table in (manifest.train, manifest.heldout)
        for i in range(len(table))
    }
    for name, data in files_of(corpus).items():
        if name == "manifest.json":
            continue
        starts = sorted(offset for key, offset in blocks if key == name)
        for position in {*range(0, len(data), max(1, len(data) // 12)), *starts, len(data) - 1}:
            (corpus / name).write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            damage = damage_of(corpus)
            assert len(damage) == 1, (name, position, damage)
            assert damage[0].startswith(name)
            start = max((start for start in starts if start <= position), default=None)
            if start is not None and position < int(blocks[name, start].split()[-1]):
                assert blocks[name, start] in damage[0]
            elif start is not None:
                assert "outside any block" in damage[0]
        (corpus / name).write_bytes(data)


def test_a_flipped_byte_of_the_manifest_is_named(corpus: Path) -> None:
    data = (corpus / "manifest.json").read_bytes()
    (corpus / "manifest.json").write_bytes(data.replace(b"train", b"trail", 1))
    with pytest.raises(CorpusError, match=r"manifest\.json.*damaged"):
        verify_corpus(str(corpus))
    (corpus / "manifest.json").write_bytes(data)


@pytest.mark.parametrize("folder", ["train", "heldout", "tokenizer", "provenance/train"])
def test_files_missing_cut_short_or_strange_are_named(corpus: Path, folder: str) -> None:
    path = min((corpus / folder).iterdir())
    name, data = f"{folder}/{path.name}", path.read_bytes()
    path.unlink()
    assert damage_of(corpus) == [f"{name}: is missing"]
    path.write_bytes(data[: len(data) // 3])
    damage = damage_of(corpus)
    assert damage
    assert all(line.startswith(name) for line in damage)
    path.write_bytes(data + b"\0" * 512)
    assert damage_of(corpus)[0].startswith(name)
    path.write_bytes(data)
    (corpus / folder / "stranger.txt").write_text("hello")
    assert damage_of(corpus) == [f"{folder}/stranger.txt: is not in the manifest"]
    (corpus / folder / "stranger.txt").unlink()
    assert damage_of(corpus) == []
