"""Decides whether the ranks of a run compute with compiled layers: at every start, alike on all ranks, on record.

One rank of each node compiles first, or takes the stored code (`CompiledCode`); the other ranks of the node find the
code there. If all ranks find stored code, all begin at once. If one rank cannot compile, no rank uses compiled layers,
and the run computes in Python. Code that was not stored is compiled in a separate process before the rank uses it, so
that a compiler that hangs or dies does not end the start. Only a failure of the rank itself or of its machine does; a
compilation during which two starts ended is not tried again.

Compiled code is stored where others cannot change it. torch stores it as shared libraries and pickles. Loading either
runs code, so it must not come from somebody who can write to the run's store. The folder on this machine belongs to the
user and is closed to others. The copy in the run is signed with a key that is never written to the store, and is not
even unpacked if the signature is wrong.
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
from dataclasses import replace
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from checkpoints.gather import Peers
from data_service.store.base import Store
from data_service.store.errors import StoreError
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.pieces import Pieces
from encoder_core.trials.compile_trial import TriedCompilation, try_apart, try_compilation
from encoder_core.trials.trial_network import Subject
from launcher.runtime.preflight.kernels import Choice, choose, gpu_here, name_of, subject_of, triton_here
from launcher.runtime.rank.journal import Link, RankJournal
from launcher.runtime.run.record import Run

FOLDER = "compiled"
KEY_ENV = "MASKFLEET_SIGNING_KEY"
_KEY = Path(".config/maskfleet/signing.key")
_CACHE = Path(".cache/maskfleet/compiled")
_DONE = "complete"  # name of the file that marks a complete folder
_SIGNATURE = hashlib.sha256().digest_size
_LEFT_OUT = ("locks", "precompiled_headers")  # valid on one machine only, or quickly made again
_MOST = 256 << 20  # largest size of the copy in a run, in bytes
_KEPT = 16  # number of folders that are kept on a machine


class CompiledCode:
    """The compiled code of one name (`launcher.runtime.preflight.kernels.name_of`).

    `home`: home folder of the user.

    Attributes:
        folder: a folder on this machine that only this user can open; a temporary one if it cannot lie below `home`.
    """

    def __init__(self, store: Store, name: str, home: Path) -> None:
        self._store, self._name, self._home = store, name, home
        self._at = f"{FOLDER}/{name}"
        self.folder = _own(home / _CACHE, name) or Path(tempfile.mkdtemp(prefix="maskfleet-compiled-"))

    @property
    def complete(self) -> bool:
        """Whether the folder has all the code that a run needs."""
        return (self.folder / _DONE).is_file()

    def fetch(self) -> bool:
        """Fill the folder from the copy in the run. Return whether the folder is complete: it is not if there is no
        copy, or the copy is damaged or not signed with our key. Raises StoreError."""
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
        """Mark the folder as complete, and write a signed copy to the run. Return whether the copy was written: it is
        not without a key, or if it is too large. Raises StoreError."""
        (self.folder / _DONE).touch()
        key, archive = signing_key(self._home), _packed(self.folder)
        if key is None or len(archive) > _MOST:
            return False
        self._store.put(self._at, _sign(key, self._name, archive) + archive)
        return True


def signing_key(home: Path) -> bytes | None:
    """Return the user's key for signatures, from the environment or from a file that only the user can read. The file
    is made at the first call. None if it cannot be made."""
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
    """Write the file at `path`, whole or not at all. Raises FileExistsError if another process has written it."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    try:
        os.link(name, path)
    finally:
        os.unlink(name)


def _own(parent: Path, name: str) -> Path | None:
    """Return the folder `name` in `parent`, made if needed; None if others can write to it. The oldest folders of more
    than `_KEPT` are deleted."""
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


_ENDS = 2  # number of starts that ended while they compiled, after which compilation is not tried again
_LONGEST_S = 900.0  # time limit of the process that compiles


class CompilationRecord(BaseModel):
    """The result of one rank's compilation, or the decision for all ranks.

    Attributes:
        compiled, why: whether layers are compiled, and the reason.
        seconds: time until the compiled code was ready.
        graphs, error, bound: as in `TriedCompilation`.
        kept: place where compiled code was found: in this process, on this machine, beside the run, or nowhere.
        failure: the compiler's error message; "" if there was none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compiled: bool
    why: str
    seconds: float = 0.0
    graphs: int = 0
    error: float | None = None
    bound: float = 0.0
    kept: str = "nowhere"
    failure: str = ""


class _Begun(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    starts: int = 0


def settle_compilation(
    run: Run, tokenizer: Tokenizer, peers: Peers, link: Link, host: str
) -> tuple[Pieces | None, CompilationRecord | None]:
    """Return the compiled pieces with which layers compute from here on (None: they compute in Python), and the record
    of the decision, the same on all ranks (None: nothing to record). Collective. `host`: name of this rank's machine.

    Raises StoreError.
    """
    choice = choose(run.recipe.compile, gpu_here(), triton=triton_here())
    if not all(peers.all_gather(choice.compiled)):
        return None, CompilationRecord(compiled=False, why=choice.why) if choice.told else None
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    subject = subject_of(run.recipe, config)
    code = CompiledCode(run.store, name_of(subject, run.recipe.zero), Path.home())
    first = peers.all_gather(host).index(host) == peers.rank
    pieces, found, together = None, None, all(peers.all_gather(code.complete))
    for number, turn in enumerate([True] if together else [first, not first], start=1):
        link.beat(0, "compiling", number)
        if turn:
            pieces, found = _turn(run, code, subject, choice, link)
        told = _told(peers, found)
        failed = next((one for one in told if not one.compiled), None)
        if failed is not None:
            return None, failed
    return pieces, told[0]


def _told(peers: Peers, found: CompilationRecord | None) -> list[CompilationRecord]:
    """Return the results of the ranks that have had their turn. Collective."""
    mine: JsonValue = None if found is None else found.model_dump(mode="json")
    return [CompilationRecord.model_validate(one) for one in peers.all_gather(mine) if one is not None]


def _turn(
    run: Run, code: CompiledCode, subject: Subject, choice: Choice, link: Link | None
) -> tuple[Pieces, CompilationRecord]:
    """Compile on this rank, or take the stored code, or what this process has compiled for an earlier group of ranks.
    Return the pieces and the result."""
    if code.folder in _compiled:
        pieces, found = _compiled[code.folder]
        return pieces, found.model_copy(update={"seconds": 0.0, "kept": "in this process"})
    pieces, found = _compile(run, code, subject, choice, link)
    if found.compiled:
        _compiled[code.folder] = pieces, found
    return pieces, found


def take_compiled(run: Run, tokenizer: Tokenizer) -> None:
    """Take the run's compiled code from this machine into this process, for the group of ranks that it will join. Does
    nothing if the run is not compiled, or its code is not here."""
    choice = choose(run.recipe.compile, gpu_here(), triton=triton_here())
    if not choice.compiled:
        return
    subject = subject_of(
        run.recipe, run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    )
    code = CompiledCode(run.store, name_of(subject, run.recipe.zero), Path.home())
    if code.complete:
        _turn(run, code, subject, choice, None)


_compiled: dict[Path, tuple[Pieces, CompilationRecord]] = {}


def _compile(
    run: Run, code: CompiledCode, subject: Subject, choice: Choice, link: Link | None
) -> tuple[Pieces, CompilationRecord]:
    kept = "on this machine" if code.complete else "beside the run" if code.fetch() else "nowhere"
    # torch reads these when it first compiles. One thread: its helper processes would outlive a rank that is killed.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(code.folder)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    pieces, apart = Pieces(), None
    if kept == "nowhere":
        # The ranks that wait for this one show no progress meanwhile.
        patience_s = min(_LONGEST_S, run.recipe.watchdog.other / 2)
        apart = _apart(run.store, f"{FOLDER}/{code.folder.name}.trying", subject, patience_s, link)
    if apart is not None and not apart.right:
        return pieces, _record(apart, choice, kept)
    tried = try_compilation(subject, pieces, compared=False)
    if apart is not None:
        seconds = apart.seconds + tried.seconds
        tried = replace(tried, error=apart.error, bound=apart.bound, seconds=seconds)
    if tried.right and kept == "nowhere":
        with suppress(StoreError, OSError):  # a failed copy only makes the next start slower
            code.keep()
    return pieces, _record(tried, choice, kept)


def _apart(
    store: Store, trying: str, subject: Subject, patience_s: float, link: Link | None
) -> TriedCompilation:
    """Compile in a separate process, and return the result. `trying`: key of the object that marks the attempt in the
    store until the process has ended."""
    starts = _Begun.model_validate_json(store.get(trying)).starts if store.size(trying) is not None else 0
    if starts >= _ENDS:
        return TriedCompilation(0.0, failure=f"{starts} starts ended while it compiled")
    store.put(trying, _Begun(starts=starts + 1).model_dump_json().encode())
    ticks = count(1)
    tried = try_apart(
        subject, patience_s, lambda: link.beat(0, "compiling", next(ticks)) if link is not None else None
    )
    store.delete_many([trying])
    return tried


def _record(tried: TriedCompilation, choice: Choice, kept: str) -> CompilationRecord:
    finite = tried.error if tried.error is not None and tried.error < float("inf") else None
    why = choice.why
    if tried.failure:
        why = "it could not be compiled"
    elif not tried.right:
        why = "its gradients are not those of Python"
    return CompilationRecord(
        compiled=tried.right,
        why=why,
        seconds=round(tried.seconds, 3),
        graphs=tried.graphs,
        error=finite,
        bound=tried.bound,
        kept=kept,
        failure=tried.failure,
    )


def record_compilation(journal: RankJournal, found: CompilationRecord | None) -> None:
    """Record the decision as an event, and show a line to the operator if compilation was tried."""
    if found is None:
        return
    journal.event("compilation", **found.model_dump(mode="json"))
    if found.compiled:
        journal.note(f"layers are compiled, after {found.seconds:.1f} s (compiled code was {found.kept})")
    elif found.bound:
        said = (
            found.failure.splitlines()[0]
            if found.failure
            else f"the error is {found.error or float('inf'):.1e}, the limit {found.bound:.1e}"
        )
        journal.note(f"layers are not compiled, and the run continues without: {found.why}: {said}")
