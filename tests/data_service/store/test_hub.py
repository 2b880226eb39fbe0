"""Data sets of the Hub are read like any store, at one commit; the Hub is a server on this machine."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.errors import CorpusError, UserError
from data_service.ingest.build import build_corpus
from data_service.store.base import Entry, Store
from data_service.store.errors import AccessDenied, BadUri, KeyMissing, StoreError, StoreUnavailable, Truncated
from data_service.store.open import open_store
from tests.support.data.raw_text import DOCUMENTS, SMALL, files_of, ignore_progress, tokenizer_folder
from tests.support.stores.http_server import LocalHandler, LocalServer

pytest.importorskip("huggingface_hub", reason="needs maskfleet[hub]")

FIRST, SECOND = "1" * 40, "2" * 40


class Hub(LocalServer):
    """A data set `org/set` with a branch `main`. `fail`: codes with which the next requests are answered."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {FIRST: {}, SECOND: {}}
        self.main = FIRST
        self.fail: list[int] = []
        super().__init__(Handler)

    def revision(self, name: str) -> str | None:
        return {"main": self.main, "refs/convert/parquet": SECOND}.get(name) or (name if name in self.commits else None)


def about(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class Handler(LocalHandler):
    """Answers as the Hub does."""

    server_state: Hub

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = unquote(self.path.partition("?")[0]).strip("/")
        if self.server_state.fail:
            return self.send_answer(self.server_state.fail.pop(0), b"{}")
        kind, _, rest = path.removeprefix("api/").partition("/")
        name, rest = rest[:7], rest[8:]
        if kind != "datasets" or name not in ("org/set", "org/own"):
            return self.send_answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if name == "org/own":
            return self.send_answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        what, _, rest = rest.partition("/")
        revision, _, inner = rest.partition("/")
        if rest.startswith("refs/convert/parquet"):
            revision, inner = "refs/convert/parquet", rest.removeprefix("refs/convert/parquet").strip("/")
        commit = self.server_state.revision(revision)
        if commit is None:
            return self.send_answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        self._answer(what, commit, inner, body)

    do_GET = do_HEAD = do_POST = _serve

    def _answer(self, what: str, commit: str, inner: str, body: str) -> None:
        files = self.server_state.commits[commit]
        match what:
            case "revision":
                return self._json({"id": "org/set", "sha": commit, "tags": []})
            case "tree":
                below = [about(path, files[path]) for path in files if path.startswith(f"{inner}/".lstrip("/"))]
                folders = {path.rpartition("/")[0] for path in files if "/" in path}
                below += [{"type": "directory", "path": one, "oid": "0" * 40} for one in folders]
                if not any(one["type"] == "file" for one in below) and inner:
                    return self.send_answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return self._json(below)
            case "paths-info":
                asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
                return self._json([about(path, files[path]) for path in asked if path in files])
            case _:
                return self._file(files.get(inner))

    def _file(self, data: bytes | None) -> None:
        if data is None:
            return self.send_answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if asked := self.headers.get("Range"):
            first, last = (int(one) for one in asked.removeprefix("bytes=").split("-"))
            return self.send_answer(206 if first < len(data) else 416, data[first : last + 1])
        self.send_answer(200, data)

    def _json(self, content: object) -> None:
        self.send_answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def opened(uri: str = "hf://datasets/org/set", patience_s: float = 5) -> Store:
    return open_store(uri, patience_s=patience_s)


@pytest.mark.long
def test_it_reads_as_a_folder_does(hub: Hub) -> None:
    draw = random.Random(1)
    names = ["a.txt", "data/b.jsonl", "data/sub/c d.txt", "data/é+%.txt", "z"]
    hub.commits[FIRST] = {name: draw.randbytes(draw.randrange(5000)) for name in names}
    for prefix in ("", "data", "data/sub"):
        store = opened(f"hf://datasets/org/set@main/{prefix}".rstrip("/"))
        below = {
            name.removeprefix(f"{prefix}/" if prefix else ""): data
            for name, data in hub.commits[FIRST].items()
            if name.startswith(f"{prefix}/" if prefix else "")
        }
        assert [one.key for one in store.list()] == sorted(below)
        assert list(store.folders()) == sorted({key.partition("/")[0] for key in below if "/" in key})
        for key, data in below.items():
            assert store.get(key) == data
            assert store.size(key) == len(data)
            assert store.entry(key) == Entry(key, len(data))
            start = draw.randrange(len(data) + 1)
            length = draw.randrange(len(data) - start + 1)
            assert store.get_range(key, start, length) == data[start : start + length]
            with pytest.raises(Truncated):
                store.get_range(key, start, len(data) - start + 1)
        assert store.entry("none") is None
        with pytest.raises(KeyMissing):
            store.get("none")
        for length in (0, 1):
            with pytest.raises(KeyMissing):
                store.get_range("none", draw.randrange(9), length)
    assert list(opened("hf://datasets/org/set/nowhere").list()) == []


def test_what_is_pushed_meanwhile_is_not_read(hub: Hub) -> None:
    hub.commits[FIRST] = {"a.txt": b"first"}
    hub.commits[SECOND] = {"a.txt": b"second", "b.txt": b"new"}
    store = opened()
    (entry,) = store.list()
    hub.main = SECOND
    assert store.get("a.txt") == b"first"
    assert store.uri == f"hf://datasets/org/set@{FIRST}"
    assert opened(store.uri).get("a.txt") == b"first"
    assert [one.version != entry.version for one in opened().list()] == [True, True]
    assert opened("hf://datasets/org/set@refs/convert/parquet").get("a.txt") == b"second"


@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_passes_is_tried_again(hub: Hub, code: int) -> None:
    hub.commits[FIRST] = {"a.txt": b"first"}
    hub.fail = [code, code]
    assert opened(patience_s=30).get("a.txt") == b"first"
    hub.fail = [code] * 1000
    with pytest.raises(StoreUnavailable):
        opened(patience_s=0.2).get("a.txt")


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("hf://datasets/org/not", StoreError),
        ("hf://datasets/org/set@gone", StoreError),
        ("hf://datasets/org/own", AccessDenied),
    ],
)
def test_a_mistake_is_said_at_once(hub: Hub, uri: str, kind: type[UserError]) -> None:
    with pytest.raises(kind) as found:
        list(opened(uri, patience_s=600).list())
    assert uri in found.value.problem
    assert "HF_TOKEN" in found.value.remedy


@pytest.mark.parametrize("uri", ["hf://org/model", "hf://datasets/set", "hf://datasets/a/b/../c@x@y", "hf://"])
def test_what_names_no_data_set_is_refused(uri: str) -> None:
    with pytest.raises(StoreError):
        open_store(uri).put("x", b"")


def test_nothing_is_written(hub: Hub) -> None:
    store = opened()
    for write in (store.put, store.put_if_absent):
        with pytest.raises(BadUri):
            write("a.txt", b"")
    with pytest.raises(BadUri):
        store.delete("a.txt")


@pytest.mark.long
def test_a_corpus_is_built_of_a_data_set(hub: Hub, tmp_path: Path) -> None:
    """The same as of its files on a disk; a push meanwhile changes nothing, and is another build afterwards."""
    folder = tmp_path / "files" / "data"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": DOCUMENTS[:30]}), folder / "a.parquet", row_group_size=7)
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[30:60]))
    hub.commits[FIRST] = {f"data/{path.name}": path.read_bytes() for path in folder.iterdir()}
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    build_corpus([str(folder)], str(tmp_path / "one"), tokenizer, SMALL, ignore_progress)
    remote = ["hf://datasets/org/set/data"]
    build_corpus(remote, str(tmp_path / "two"), tokenizer, SMALL, ignore_progress)
    one, two = ({k: v for k, v in files_of(tmp_path / name).items() if k.endswith(".tar")} for name in ("one", "two"))
    assert one == two
    build_corpus(remote, str(tmp_path / "two"), tokenizer, SMALL, ignore_progress)
    hub.commits[SECOND], hub.main = {"data/b.jsonl": b'{"text": "other"}\n'}, SECOND
    with pytest.raises(CorpusError, match="input_listing"):
        build_corpus(remote, str(tmp_path / "two"), tokenizer, SMALL, ignore_progress)
