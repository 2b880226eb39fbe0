"""Training reads the same bytes of a corpus with provenance as of one without, and opens no sidecar."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_service.corpus.provenance import ProvenanceOptions
from data_service.ingest.build import build_corpus
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.store.local import LocalStore
from data_service.stream.stream import Stream
from tests.support.data.raw_text import (
    DOCUMENTS,
    SMALL,
    ignore_progress,
    small_tokenizer,
    tokenizer_folder,
    write_jsonl,
)

Read = tuple[str, int, int]  # key, first byte, bytes


def read_all(uri: str, fingerprint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, list[Read]]:
    """The tokens of an epoch, and every read of the store."""
    reads: list[Read] = []
    get, get_range = LocalStore.get, LocalStore.get_range

    def counted_get(store: LocalStore, key: str) -> bytes:
        data = get(store, key)
        reads.append((key, 0, len(data)))
        return data

    def counted_range(store: LocalStore, key: str, start: int, length: int) -> bytes:
        reads.append((key, start, length))
        return get_range(store, key, start, length)

    tokenizer = small_tokenizer()
    spec = StreamSpec(
        sources=(SourceSpec(name="text", uri=uri, manifest_fingerprint=fingerprint),),
        length=128,
        special=tokenizer.special,
        never_masked=tuple(int(i) for i in np.flatnonzero(tokenizer.special_mask)),
        vocab_size=tokenizer.vocab_size,
        seed=3,
    )
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", counted_get)
        patch.setattr(LocalStore, "get_range", counted_range)
        stream = Stream(spec)
        tokens = stream.read(0, 0, stream.samples_per_epoch).tokens
    return tokens, sorted(reads)


@pytest.mark.long
def test_training_reads_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS[:40])
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    known = SMALL.model_copy(update={"provenance": ProvenanceOptions(id="id")})
    found = {}
    for name, options in (("plain", SMALL), ("known", known)):
        uri = str(tmp_path / name)
        manifest = build_corpus([str(text)], uri, tokenizer, options, ignore_progress)
        found[name] = read_all(uri, manifest.fingerprint, monkeypatch)
    (tokens, reads), (same, others) = found["plain"], found["known"]
    np.testing.assert_array_equal(tokens, same)
    assert [read for read in others if read[0] != "manifest.json"] == [
        read for read in reads if read[0] != "manifest.json"
    ]
    assert len([read for read in others if read[0] == "manifest.json"]) == len(
        [read for read in reads if read[0] == "manifest.json"]
    )
    assert not [read for read in others if "provenance" in read[0]]


@pytest.mark.long
def test_what_streams_training_data_does_not_import_sidecars() -> None:
    code = "import sys, data_service.stream.stream; print([m for m in sys.modules if 'sidecar' in m or 'pyarrow' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
