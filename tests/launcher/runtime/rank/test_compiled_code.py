"""Compiled code beside a run: taken only if it is signed by our key, and never unpacked otherwise."""

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.gather import Alone
from data_service.store.local import LocalStore
from encoder_core.trials.compile_trial import TriedCompilation
from launcher.runtime.rank import compilation
from launcher.runtime.rank.compilation import (
    FOLDER,
    KEY_ENV,
    CompiledCode,
    settle_compilation,
    signing_key,
)
from launcher.runtime.run.record import open_run
from tests.support.runs import small_runs

NAME = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)


def kept(tmp_path: Path, home: str = "owner") -> LocalStore:
    """A store with what the owner compiled."""
    store = LocalStore(tmp_path / "run")
    code = CompiledCode(store, NAME, tmp_path / home)
    (code.folder / "ab").mkdir()
    (code.folder / "ab" / "kernel.so").write_bytes(b"machine code")
    (code.folder / "locks").mkdir()
    (code.folder / "locks" / "lock").touch()
    assert code.keep()
    assert code.complete
    return store


def elsewhere(tmp_path: Path) -> Path:
    """Another machine with the owner's key and nothing else."""
    home = tmp_path / "elsewhere"
    key = home / ".config/maskfleet"
    key.mkdir(parents=True)
    (tmp_path / "owner/.config/maskfleet/signing.key").rename(key / "signing.key")
    return home


def test_another_machine_with_the_key_takes_it(tmp_path: Path) -> None:
    store = kept(tmp_path)
    code = CompiledCode(store, NAME, elsewhere(tmp_path))
    assert not code.complete
    assert code.fetch()
    assert (code.folder / "ab" / "kernel.so").read_bytes() == b"machine code"
    assert not (code.folder / "locks").exists()


def test_nobody_else_does(tmp_path: Path) -> None:
    store = kept(tmp_path)
    code = CompiledCode(store, NAME, tmp_path / "stranger")
    assert not code.fetch()
    assert not list(code.folder.iterdir())
    moved = "f" * len(NAME)
    store.put(f"{FOLDER}/{moved}", store.get(f"{FOLDER}/{NAME}"))  # of another machine's kind
    assert not CompiledCode(store, moved, elsewhere(tmp_path)).fetch()


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_anywhere_is_not_unpacked(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("changed")
    store = kept(tmp_path)
    content = bytearray(store.get(f"{FOLDER}/{NAME}"))
    content[at % len(content)] ^= 1 << bit
    store.put(f"{FOLDER}/{NAME}", bytes(content))
    code = CompiledCode(store, NAME, elsewhere(tmp_path))
    assert not code.fetch()
    assert not list(code.folder.iterdir())


def test_an_archive_of_somebody_who_can_write_to_the_store_is_left_alone(tmp_path: Path) -> None:
    store, held = LocalStore(tmp_path / "run"), io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("complete"))
    for forged in (held.getvalue(), bytes(32) + held.getvalue(), b""):
        store.put(f"{FOLDER}/{NAME}", forged)
        assert not CompiledCode(store, NAME, tmp_path / "owner").fetch()


def test_the_key_is_one_for_all_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = signing_key(tmp_path)
    assert key is not None
    assert signing_key(tmp_path) == key
    path = tmp_path / ".config/maskfleet/signing.key"
    assert path.stat().st_mode & 0o77 == 0
    path.chmod(0o644)  # others may have read it
    assert signing_key(tmp_path) is None
    monkeypatch.setenv(KEY_ENV, "a secret of all nodes")
    told = signing_key(tmp_path)
    assert told is not None
    assert told == signing_key(tmp_path / "other")


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    folder = tmp_path / ".cache/maskfleet/compiled"
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)
    assert folder not in CompiledCode(store, NAME, tmp_path).folder.parents
    os.chmod(folder, 0o700)
    assert folder in CompiledCode(store, NAME, tmp_path).folder.parents


class Silent:
    ends = None

    def beat(self, step: int, doing: str, done: int = 0) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...
    def stop_requested(self) -> bool:
        return False


@pytest.mark.parametrize(("error", "compiled"), [(1e-7, True), (1.1e-4, False)])
def test_the_process_that_tries_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, compiled: bool
) -> None:
    """Its error and its bound count at a first start; the rank itself compares nothing."""
    tried = TriedCompilation(1.0, 3, error, 1e-4)
    monkeypatch.setattr(compilation, "try_apart", lambda *_: tried)
    monkeypatch.setattr(compilation, "try_compilation", lambda *_, **__: TriedCompilation(1.0, 3))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    small_runs.prepare_corpus(tmp_path)
    run = open_run(small_runs.new_run(tmp_path, "run", "compile=true"))
    pieces, found = settle_compilation(run, run.tokenizer(), Alone(), Silent(), "here")
    assert found is not None
    assert (pieces is not None, found.compiled, found.error, found.bound) == (compiled, compiled, error, 1e-4)
