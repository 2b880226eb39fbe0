"""Chooses the kernels of a run on GPUs, and whether its layers are compiled. Each start makes both decisions, the same
on all ranks, and records them.

The first rank on each kind of GPU tries the kernels that the recipe's networks need, in a separate process
(`encoder_core/trials/kernel_trial.py`). The result is stored in the run under a hash of everything that it depends on,
so every later start uses the same kernels without a trial. A kernel that hangs or crashes does not end the trial. Only
a failure of the rank itself or of its machine ends the start. On a CPU nothing is tried: the tests check its kernels
against the formula.

One rank of each node compiles first, unless the compiled code is on the machine already; the node's other ranks then
load it. If one rank cannot compile, no rank uses compiled layers, and the run computes in Python. Missing code is first
compiled and checked in a separate process, so that a compiler that hangs or dies does not end the start.

Compiled code stays on the machine's own disk, in torch's cache. torch stores it as shared libraries and pickles.
Loading either runs code, so it must not come from somebody who can write to the run's store. The folder belongs to the
user and is closed to others.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from checkpoints.gather import Peers, gather_as
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.gpu_attention import newer_flash_versions
from encoder_core.layers.kernel_choice import set_preference
from encoder_core.layers.pieces import Pieces
from encoder_core.trials.compile_trial import TriedCompilation, try_compilation, try_in_process
from encoder_core.trials.kernel_trial import Limits
from encoder_core.trials.trial_network import TrialSubject
from launcher.runtime.preflight.collective import installed_versions
from launcher.runtime.preflight.kernels import (
    CompileChoice,
    KernelTrialRecord,
    KernelVerdict,
    choose_compilation,
    compiled_code_name,
    examine_kernels,
    local_gpu_name,
    trial_subject,
)
from launcher.runtime.preflight.releases import triton_problem, triton_release
from launcher.runtime.rank.journal import RankJournal, SupervisorLink
from launcher.runtime.run.record import Run

KERNELS_FOLDER = "kernels"  # folder of the stored verdicts in the run
# Converts a rank's verdict, and whether it was made just now; None from a rank that neither read nor made one.
_VERDICT_ADAPTER: TypeAdapter[tuple[KernelVerdict, bool] | None] = TypeAdapter(tuple[KernelVerdict, bool] | None)


def agree_on_kernels(run: Run, tokenizer: Tokenizer, peers: Peers, link: SupervisorLink) -> list[KernelVerdict]:
    """Set the kernels that this process uses from here on: those of the verdict for its GPU. Return the verdicts of the
    trials that were made just now, the same on all ranks. Collective.

    Raises StoreError.
    """
    gpu = local_gpu_name()
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    subject = trial_subject(run.recipe, config)
    name = None if gpu is None else _verdict_file_name(gpu, subject)
    names = peers.all_gather(name)
    if not any(names):
        return []
    mine = None
    if name is not None and gpu is not None and names.index(name) == peers.rank:
        mine = _stored_or_new_verdict(run, name, gpu, subject, link)
    found = gather_as(peers, _VERDICT_ADAPTER, mine)
    if name is not None and (verdict := found[names.index(name)]) is not None:
        set_preference(verdict[0].preference)
    return [verdict[0] for verdict in found if verdict is not None and verdict[1]]


def _verdict_file_name(gpu: str, subject: TrialSubject) -> str:
    marks = [name for name in ("causal", "stable") if getattr(subject, name)]
    what = {
        "gpu": gpu,
        "installed": installed_versions() | newer_flash_versions(),
        "networks": [network.model_dump(mode="json") for network in subject.networks],
        "rows": [str(subject.dtype), subject.rows, subject.length, *marks],
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


def _stored_or_new_verdict(
    run: Run, name: str, gpu: str, subject: TrialSubject, link: SupervisorLink
) -> tuple[KernelVerdict, bool]:
    """Return the run's verdict of this name (if there is none, try the kernels), and whether it was made just now."""
    store, key = run.store, f"{KERNELS_FOLDER}/{name}.json"
    if (stored := _read_verdict(store, key)) is not None:
        return stored, False
    ticks = count(1)
    # The ranks that wait for this one make no progress, so the trial ends before their watchdog acts.
    limits = Limits(whole=min(Limits.whole, run.recipe.watchdog.other / 2))
    timed = not run.recipe.deterministic
    verdict = examine_kernels(
        subject, gpu, timed=timed, limits=limits, tick=lambda: link.beat(0, "trying kernels", next(ticks))
    )
    if not verdict.tried:  # no trial was made, as on a full GPU; the next start tries again
        return verdict, True
    data = verdict.model_dump_json(indent=1).encode()
    if not store.put_if_absent(key, data):  # another node with such a GPU was first, or the stored record is damaged
        if (theirs := _read_verdict(store, key)) is not None:
            return theirs, True
        store.put(key, data)
    return verdict, True


def _read_verdict(store: Store, key: str) -> KernelVerdict | None:
    """Return the verdict at `key`; None if there is none, or it is damaged."""
    try:
        return KernelVerdict.model_validate_json(store.get(key))
    except (KeyMissing, ValidationError):
        return None


def record_kernels(journal: RankJournal, verdicts: Sequence[KernelVerdict]) -> None:
    """Record an event for each kind of GPU, and show a line about each kernel that was left out."""
    for verdict in verdicts:
        out = [one.model_dump(mode="json", exclude={"right"}) for one in verdict.rejected_trials]
        seconds = {_kernel_title(one): one.seconds for one in verdict.tried if one.seconds is not None}
        journal.event(
            "kernels",
            gpu=verdict.gpu,
            plain=list(verdict.plain),
            dropped=list(verdict.dropped),
            left_out=out,
            seconds=seconds,
            elsewhere={place: list(order) for place, order in verdict.elsewhere.items()},
            ended=verdict.ended,
        )
        for one in verdict.rejected_trials:
            versions = f"torch {version('torch')}, Triton {triton_release() or 'none'}"
            journal.note(
                f"{one.place} on {verdict.gpu}, {versions}: "
                f"{_replacement_kernel(verdict, one)} replaces {_rejection_text(one)}"
            )
        if verdict.ended:
            journal.note(f"the trial of kernels on {verdict.gpu} was ended early: {verdict.ended}")


def _kernel_title(one: KernelTrialRecord) -> str:
    return one.kernel if one.place == "attention" else f"{one.place} {one.kernel}"


def _replacement_kernel(verdict: KernelVerdict, one: KernelTrialRecord) -> str:
    """Return the name of the kernel that is used in place of a rejected one."""
    attention = verdict.dropped if one.dropped else verdict.plain
    order = attention if one.place == "attention" else verdict.elsewhere.get(one.place, ())
    return f"`{order[0]}`" if order else "torch"


def _rejection_text(one: KernelTrialRecord) -> str:
    where = " with dropout" if one.dropped else ""
    why = one.failure or f"its results are {one.error or float('inf'):.1e} off, the limit is {one.bound:.1e}"
    return f"the kernel `{one.kernel}`{where}: {why}"


_CACHE_FOLDER = Path(".cache/maskfleet/compiled")  # below the user's home folder
_COMPLETE_MARK = "complete"  # name of the file that marks a complete folder
_MAX_FOLDERS = 16  # largest number of folders of compiled code that a machine keeps


class CompiledCode:
    """The compiled code on this machine under one name (`launcher.runtime.preflight.kernels.compiled_code_name`).

    `home`: home folder of the user.

    Attributes:
        folder: torch's cache, which only this user can open; a temporary folder if it cannot lie below `home`.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.folder = _private_folder(home / _CACHE_FOLDER, name) or Path(
            tempfile.mkdtemp(prefix="maskfleet-compiled-")
        )

    @property
    def is_complete(self) -> bool:
        """Whether the folder has all the code that a run needs."""
        return (self.folder / _COMPLETE_MARK).is_file()

    def mark_complete(self) -> None:
        """Mark the folder as complete. Raises OSError."""
        (self.folder / _COMPLETE_MARK).touch()


def _private_folder(parent: Path, name: str) -> Path | None:
    """Return the folder `name` in `parent`, created if needed; None if other users can open it. If there are more than
    `_MAX_FOLDERS` folders, the oldest are deleted."""
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = parent / name
        folder.mkdir(exist_ok=True, mode=0o700)
        if not (_is_private(parent) and _is_private(folder)):
            return None
        os.utime(folder)
        others = sorted((p for p in parent.iterdir() if p != folder), key=lambda p: p.stat().st_mtime)
    except OSError:
        return None
    for old in others[: -_MAX_FOLDERS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _is_private(path: Path) -> bool:
    found = path.lstat()
    closed = not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return found.st_uid == os.getuid() and closed and not stat.S_ISLNK(found.st_mode)


_COMPILE_TIMEOUT_S = 900.0  # seconds until the process that compiles is ended


class CompilationRecord(StrictRecord):
    """The result of one rank's compilation, or the decision for all ranks.

    Attributes:
        compiled, why: whether layers are compiled, and the reason.
        seconds: time until the compiled code was ready.
        graphs, error, bound: as in `TriedCompilation`.
        kept: where compiled code was found: "in this process", "on this machine", or "nowhere".
        failure: the compiler's error message; "" if there was none.
    """

    compiled: bool
    why: str
    seconds: float = 0.0
    graphs: int = 0
    error: float | None = None
    bound: float = 0.0
    kept: str = "nowhere"
    failure: str = ""


# Converts a rank's result for the exchange between ranks; None from a rank that has not compiled yet.
_RECORD_ADAPTER: TypeAdapter[CompilationRecord | None] = TypeAdapter(CompilationRecord | None)


def agree_on_compilation(
    run: Run, tokenizer: Tokenizer, peers: Peers, link: SupervisorLink, host: str
) -> tuple[Pieces | None, CompilationRecord | None]:
    """Return the compiled pieces of layers to use from here on (None: layers run in Python), and the record of the
    decision, the same on all ranks (None: nothing to record). Collective.

    `host`: name of this rank's machine.
    """
    choice = choose_compilation(run.recipe.compile, local_gpu_name(), unfit=triton_problem())
    if not all(peers.all_gather(choice.compiled)):
        return None, CompilationRecord(compiled=False, why=choice.why) if choice.told else None
    subject, code = _local_compiled_code(run, tokenizer)
    first = peers.all_gather(host).index(host) == peers.rank
    pieces, found, together = None, None, all(peers.all_gather(code.is_complete))
    for number, turn in enumerate([True] if together else [first, not first], start=1):
        link.beat(0, "compiling", number)
        if turn:
            pieces, found = _compile_once(run, code, subject, choice, link)
        verdicts = [one for one in gather_as(peers, _RECORD_ADAPTER, found) if one is not None]
        failed = next((one for one in verdicts if not one.compiled), None)
        if failed is not None:
            return None, failed
    return pieces, verdicts[0]


def _local_compiled_code(run: Run, tokenizer: Tokenizer) -> tuple[TrialSubject, CompiledCode]:
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    subject = trial_subject(run.recipe, config)
    return subject, CompiledCode(compiled_code_name(subject, run.recipe.zero), Path.home())


def _compile_once(
    run: Run, code: CompiledCode, subject: TrialSubject, choice: CompileChoice, link: SupervisorLink | None
) -> tuple[Pieces, CompilationRecord]:
    """Return the compiled pieces and the result. Compile them, or load this machine's code, or reuse the pieces that
    this process compiled for an earlier group of ranks."""
    if code.folder in _compiled_by_folder:
        pieces, found = _compiled_by_folder[code.folder]
        return pieces, found.model_copy(update={"seconds": 0.0, "kept": "in this process"})
    pieces, found = _compile_or_load(run, code, subject, choice, link)
    if found.compiled:
        _compiled_by_folder[code.folder] = pieces, found
    return pieces, found


def load_compiled_code(run: Run, tokenizer: Tokenizer) -> None:
    """Load the run's compiled code into this process, before it joins a group of ranks. Does nothing if the run is not
    compiled, or if this machine does not have the code."""
    choice = choose_compilation(run.recipe.compile, local_gpu_name(), unfit=triton_problem())
    if not choice.compiled:
        return
    subject, code = _local_compiled_code(run, tokenizer)
    if code.is_complete:
        _compile_once(run, code, subject, choice, None)


_compiled_by_folder: dict[Path, tuple[Pieces, CompilationRecord]] = {}  # what this process compiled or loaded


def _compile_or_load(
    run: Run, code: CompiledCode, subject: TrialSubject, choice: CompileChoice, link: SupervisorLink | None
) -> tuple[Pieces, CompilationRecord]:
    """Load this machine's compiled code into this process. If there is none, a separate process compiles it first."""
    kept = "on this machine" if code.is_complete else "nowhere"
    # torch reads these variables when it first compiles. With more threads it has processes that outlive a killed rank.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(code.folder)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    pieces, apart, ticks = Pieces(), None, count(1)
    if kept == "nowhere":
        # The ranks that wait for this one make no progress, so the compilation ends before their watchdog acts.
        patience_s = min(_COMPILE_TIMEOUT_S, run.recipe.watchdog.other / 2)
        apart = try_in_process(subject, patience_s, lambda: link.beat(0, "compiling", next(ticks)) if link else None)
        if not apart.is_right:
            return pieces, _compilation_record(apart, choice, kept)
    tried = try_compilation(subject, pieces, compared=False)
    if apart is not None:
        seconds = apart.seconds + tried.seconds
        tried = replace(tried, error=apart.error, bound=apart.bound, seconds=seconds)
    if tried.is_right and kept == "nowhere":
        with suppress(OSError):  # without the mark, the next start compiles again
            code.mark_complete()
    return pieces, _compilation_record(tried, choice, kept)


def _compilation_record(tried: TriedCompilation, choice: CompileChoice, kept: str) -> CompilationRecord:
    finite = tried.error if tried.error is not None and tried.error < float("inf") else None
    why = choice.why
    if tried.failure:
        why = "it could not be compiled"
    elif not tried.is_right:
        why = "its gradients are not those of Python"
    return CompilationRecord(
        compiled=tried.is_right,
        why=why,
        seconds=round(tried.seconds, 3),
        graphs=tried.graphs,
        error=finite,
        bound=tried.bound,
        kept=kept,
        failure=tried.failure,
    )


def record_compilation(journal: RankJournal, found: CompilationRecord | None) -> None:
    """Record the decision as an event, and show it to the operator."""
    if found is None:
        return
    journal.event("compilation", **found.model_dump(mode="json"))
    if found.compiled:
        journal.note(f"layers are compiled, after {found.seconds:.1f} s (compiled code found: {found.kept})")
    elif found.bound:
        said = (
            found.failure.splitlines()[0]
            if found.failure
            else f"the error is {found.error or float('inf'):.1e}, the limit {found.bound:.1e}"
        )
        journal.note(f"layers are not compiled, and the run computes in Python: {found.why}: {said}")
    else:
        journal.note(f"layers are not compiled: {found.why}")
