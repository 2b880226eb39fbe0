"""Compiled code, kept where it is safe to run: in a folder of this machine's user, and signed beside the run.

torch keeps what it compiled as shared libraries and pickles. To load either is to run it, so nothing of it may come
from somebody who can write to a store. The folder on this machine is the user's own and closed to others. What lies
beside the run is signed with a key that never goes to the store, and is not even unpacked if the signature is not ours.
"""

import hashlib
import hmac
import io
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from data_service.store.base import Store

FOLDER = "compiled"
KEY_ENV = "MASKFLEET_SIGNING_KEY"
_KEY = Path(".config/maskfleet/signing.key")
_CACHE = Path(".cache/maskfleet/compiled")
_DONE = "complete"  # a file of that name: the folder has all that a run needs
_SIGNATURE = hashlib.sha256().digest_size
_LEFT_OUT = ("locks", "precompiled_headers")  # of a machine, or made again quickly
_MOST = 256 << 20  # bytes beside a run
_KEPT = 16  # folders of a machine


class CompiledCode:
    """What was compiled under one name (`launcher.runtime.preflight.compilation.name_of`).

    `home`: of the user. `folder` is on this machine, and only this user's; a temporary one if there is none such.
    """

    def __init__(self, store: Store, name: str, home: Path) -> None:
        self._store, self._name, self._home = store, name, home
        self._at = f"{FOLDER}/{name}"
        self.folder = _own(home / _CACHE, name) or Path(tempfile.mkdtemp(prefix="maskfleet-compiled-"))

    @property
    def complete(self) -> bool:
        """Whether the folder has what a run needs."""
        return (self.folder / _DONE).is_file()

    def fetch(self) -> bool:
        """Fill the folder with what lies beside the run. False: nothing is there, or it is not signed by our key, or
        damaged. Raises StoreError."""
        key = signing_key(self._home)
        if key is None or self.complete or self._store.size(self._at) is None:
            return self.complete
        signed = self._store.get(self._at)
        signature, archive = signed[:_SIGNATURE], signed[_SIGNATURE:]
        if not hmac.compare_digest(signature, _sign(key, self._name, archive)):
            return False
        with (
            suppress(OSError, tarfile.TarError),
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar,
        ):
            tar.extractall(self.folder, filter="data")
        return self.complete

    def keep(self) -> bool:
        """The folder is complete now; a signed copy goes beside the run. False: there is no key, or it is too large.
        Raises StoreError."""
        (self.folder / _DONE).touch()
        key, archive = signing_key(self._home), _packed(self.folder)
        if key is None or len(archive) > _MOST:
            return False
        self._store.put(self._at, _sign(key, self._name, archive) + archive)
        return True


def signing_key(home: Path) -> bytes | None:
    """The owner's, from the environment or a file that only the owner can read, made when it is first needed; None
    where there is no place for one."""
    if told := os.environ.get(KEY_ENV):
        return hashlib.sha256(told.encode()).digest()
    path = home / _KEY
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            _write_once(path, secrets.token_bytes(32))
        if _only_ours(path):
            return path.read_bytes()
    return None


def _write_once(path: Path, content: bytes) -> None:
    """Whole or not at all; who comes second raises FileExistsError."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    try:
        os.link(name, path)
    finally:
        os.unlink(name)


def _own(parent: Path, name: str) -> Path | None:
    """The folder of that name, if it is or becomes one that only this user can write to. The oldest of many go."""
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = parent / name
        folder.mkdir(exist_ok=True, mode=0o700)
        if not (_only_ours(parent) and _only_ours(folder)):
            return None
        os.utime(folder)
        others = sorted((p for p in parent.iterdir() if p != folder), key=lambda p: p.stat().st_mtime)
    except OSError:
        return None
    for old in others[: -_KEPT + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _only_ours(path: Path) -> bool:
    found = path.lstat()
    closed = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return found.st_uid == os.getuid() and closed and not stat.S_ISLNK(found.st_mode)


def _packed(folder: Path) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and not path.is_symlink() and inside.parts[0] not in _LEFT_OUT:
                tar.add(path, arcname=str(inside))
    return held.getvalue()


def _sign(key: bytes, name: str, archive: bytes) -> bytes:
    return hmac.new(key, b"maskfleet compiled code\n" + name.encode() + b"\n" + archive, "sha256").digest()
