"""Whether the ranks of a run compute compiled layers: decided at every start, by all ranks alike, and put on record.

One rank of each node compiles first, or takes what was kept (`compiled_code.py`); the others of the node find it there.
Where all find it, all begin at once. If a rank cannot, none does: the run goes on in Python.

What was not kept is compiled in a process of its own before the rank takes it: a compiler that hangs or dies costs no
start. Only what ends the rank itself or its machine does; a compilation at which two starts ended is not tried again.
"""

import os
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
from launcher.runtime.preflight.compilation import Choice, choose, name_of, triton_here
from launcher.runtime.preflight.kernels import gpu_here, subject_of
from launcher.runtime.rank.compiled_code import FOLDER, CompiledCode
from launcher.runtime.rank.journal import Link, RankJournal
from launcher.runtime.run.record import Run

_ENDS = 2  # starts that ended while they compiled, after which it is not tried
_LONGEST_S = 900.0  # for a process to compile


class CompilationRecord(BaseModel):
    """What a rank found, and afterwards what holds for all.

    Attributes:
        compiled, why: what is done, and why.
        seconds: until it was ready. graphs, error, bound: see `TriedCompilation`.
        kept: where compiled code was found: on this machine, beside the run, or nowhere.
        failure: in the compiler's words.
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
    """The pieces by which layers compute from here on, None for Python; and what to put on record, if anything, the
    same on all ranks. Collective. `host`: this rank's machine.

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
    """What the ranks found that had their turn. Collective."""
    mine: JsonValue = None if found is None else found.model_dump(mode="json")
    return [CompilationRecord.model_validate(one) for one in peers.all_gather(mine) if one is not None]


def _turn(
    run: Run, code: CompiledCode, subject: Subject, choice: Choice, link: Link
) -> tuple[Pieces, CompilationRecord]:
    """One rank's."""
    kept = "on this machine" if code.complete else "beside the run" if code.fetch() else "nowhere"
    # torch reads these when it first compiles; its helpers' processes would outlive a rank that is killed.
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
        tried = replace(tried, error=apart.error, seconds=apart.seconds + tried.seconds)
    if tried.right and kept == "nowhere":
        with suppress(StoreError, OSError):  # a start is not worth more than the run
            code.keep()
    return pieces, _record(tried, choice, kept)


def _apart(store: Store, trying: str, subject: Subject, patience_s: float, link: Link) -> TriedCompilation:
    """What a process of its own compiles. `trying`: a mark of that lies there until it has ended."""
    starts = _Begun.model_validate_json(store.get(trying)).starts if store.size(trying) is not None else 0
    if starts >= _ENDS:
        return TriedCompilation(0.0, failure=f"{starts} starts ended while it compiled")
    store.put(trying, _Begun(starts=starts + 1).model_dump_json().encode())
    ticks = count(1)
    tried = try_apart(subject, patience_s, lambda: link.beat(0, "compiling", next(ticks)))
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
    """An event, and a line for people where it was tried."""
    if found is None:
        return
    journal.event("compilation", **found.model_dump(mode="json"))
    if found.compiled:
        journal.note(f"layers are compiled, after {found.seconds:.1f} s (compiled code was {found.kept})")
    elif found.bound:
        said = (
            found.failure.splitlines()[0]
            if found.failure
            else f"{found.error or float('inf'):.1e} off, {found.bound:.1e} may be"
        )
        journal.note(f"layers are not compiled, the run goes on without: {found.why}: {said}")
