"""An export appears whole or not at all, and takes the place of nothing but a former export."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.errors import ExportError
from checkpoints.hf.folder import EXPORT_RECORD, publish, replaceable_files
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace
from data_service.store.local import LocalStore
from data_service.store.open import open_store

NETWORK = {"config.json": "{}", "model.safetensors": "weights", "README.md": "card"}
PAIR = {f"{part}/{name}": text for part in ("generator", "discriminator") for name, text in NETWORK.items()}


def folder_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def content(out: Store) -> dict[str, str]:
    return {entry.key: out.get(entry.key).decode() for entry in out.list() if entry.key != EXPORT_RECORD}


def put(files: dict[str, str], out: Store, beside: Path) -> None:
    publish(folder_of(beside, files), out, replaceable_files(out))


@pytest.mark.long
def test_a_former_export_is_replaced_whole(any_store: Store, tmp_path: Path) -> None:
    put(PAIR, any_store, tmp_path / "first")
    put(NETWORK, any_store, tmp_path / "second")
    assert content(any_store) == NETWORK


def test_remains_of_a_killed_export_go_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / "out" / ".tmp-killed"
    left.parent.mkdir()
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    put(NETWORK, open_store(left.parent), tmp_path / "files")
    assert not left.exists()


@pytest.mark.parametrize("name", ["config.json", "notes/todo.txt", ".gitattributes"])
def test_files_of_others_are_neither_overwritten_nor_mixed(tmp_path: Path, name: str) -> None:
    out = open_store(folder_of(tmp_path / "out", {name: "mine"}))
    with pytest.raises(ExportError, match=rf"{tmp_path}/out .*: {name}\n"):
        replaceable_files(out)
    assert content(out) == {name: "mine"}


def test_a_file_that_was_changed_since_is_not_ours_any_more(tmp_path: Path) -> None:
    out = open_store(tmp_path / "out")
    put(NETWORK, out, tmp_path / "first")
    (tmp_path / "out/README.md").write_text("card, corrected")
    with pytest.raises(ExportError, match=rf"{tmp_path}/out.*: README\.md\n"):
        replaceable_files(out)
    assert content(out)["README.md"] == "card, corrected"


def test_a_damaged_record_removes_nothing(tmp_path: Path) -> None:
    out = open_store(tmp_path / "out")
    put(NETWORK, out, tmp_path / "first")
    (tmp_path / "out" / EXPORT_RECORD).write_text(json.dumps({"files": 3}))
    with pytest.raises(ExportError, match="damaged"):
        replaceable_files(out)
    assert content(out) == NETWORK


class Killed(BaseException):
    """The process is gone: nothing that would tidy up runs any more."""


@dataclass(frozen=True)
class Dying(LocalStore):
    """A store in which all operations that change something fail after the first `left`."""

    left: list[int]
    error: type[BaseException]

    def _step(self) -> None:
        if self.left[0] == 0:
            raise self.error("here")
        self.left[0] -= 1

    def put_file(self, key: str, path: Path) -> None:
        self._step()
        super().put_file(key, path)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._step()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._step()
        super().delete(key)


@pytest.mark.long
@pytest.mark.heavy
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2 * (len(PAIR) + 1)), st.booleans())
def test_killed_anywhere_it_is_no_model_and_can_be_repeated(
    tmp_path_factory: pytest.TempPathFactory, left: int, again: bool
) -> None:
    root = tmp_path_factory.mktemp("killed")
    out = open_store(root / "out")
    if again:
        put(NETWORK, out, root / "former")
    dying = Dying(root / "out", [left], Killed)
    try:
        put(PAIR, dying, root / "files")
    except Killed:
        found = content(out)
        configurations = {name for name in found if name.endswith("config.json")}
        if configurations:  # the old one untouched, or all but the last write of the new one
            assert found == NETWORK or {name for name in PAIR if "config" not in name} <= found.keys()
    put(PAIR, out, root / "files")
    assert content(out) == PAIR


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(Dying):
        def put_file(self, key: str, path: Path) -> None:
            if key == "model.safetensors":
                raise OutOfSpace(f"no space for {key}", remedy="free some")
            super().put_file(key, path)

    with pytest.raises(OutOfSpace, match=r"model\.safetensors"):
        put(NETWORK, Full(tmp_path / "out", [99], Killed), tmp_path / "files")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
