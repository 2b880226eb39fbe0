"""Chooses the kernels that the ranks of a run use on GPUs: by a trial for each kind of GPU, stored in the run.

The first rank on each kind of GPU tries the kernels that the recipe's networks need, in a separate process
(`encoder_core/trials/kernel_trial.py`). The result is stored in the run under a hash of everything that it depends on,
so every later start uses the same kernels without a trial. A kernel that hangs or crashes does not end the trial. Only
a failure of the rank itself or of its machine ends the start. On a CPU nothing is tried: the tests check its kernels
against the formula.
"""

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count

from pydantic import TypeAdapter

from checkpoints.gather import Peers, gather_as
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.kernel_choice import set_preference
from encoder_core.trials.kernel_trial import Limits
from encoder_core.trials.trial_network import Subject
from launcher.runtime.preflight.collective import installed_versions
from launcher.runtime.preflight.kernels import (
    KernelVerdict,
    TrialRecord,
    examine_kernels,
    local_gpu_name,
    trial_subject,
)
from launcher.runtime.preflight.releases import triton_release
from launcher.runtime.rank.journal import Link, RankJournal
from launcher.runtime.run.record import Run

FOLDER = "kernels"
_VERDICT: TypeAdapter[tuple[KernelVerdict, bool] | None] = TypeAdapter(tuple[KernelVerdict, bool] | None)


def settle_kernels(run: Run, tokenizer: Tokenizer, peers: Peers, link: Link) -> list[KernelVerdict]:
    """Set the kernels with which this process computes from here on, those found for its GPU. Return the verdicts of
    the trials that were made just now, the same on all ranks. Collective.

    Raises StoreError.
    """
    gpu = local_gpu_name()
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    subject = trial_subject(run.recipe, config)
    name = None if gpu is None else _verdict_name(gpu, subject)
    names = peers.all_gather(name)
    if not any(names):
        return []
    mine = None
    if name is not None and gpu is not None and names.index(name) == peers.rank:
        mine = _verdict(run, name, gpu, subject, link)
    found = gather_as(peers, _VERDICT, mine)
    if name is not None and (told := found[names.index(name)]) is not None:
        set_preference(told[0].preference)
    return [told[0] for told in found if told is not None and told[1]]


def _verdict_name(gpu: str, subject: Subject) -> str:
    marks = [name for name in ("causal", "stable") if getattr(subject, name)]
    what = {
        "gpu": gpu,
        "installed": installed_versions(),
        "networks": [network.model_dump(mode="json") for network in subject.networks],
        "rows": [str(subject.dtype), subject.rows, subject.length, *marks],
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


def _verdict(run: Run, name: str, gpu: str, subject: Subject, link: Link) -> tuple[KernelVerdict, bool]:
    """Return the run's verdict of this name, and whether its trial was made just now. Try the kernels if the run has
    none."""
    store, key = run.store, f"{FOLDER}/{name}.json"
    if store.size(key) is not None:
        return KernelVerdict.model_validate_json(store.get(key)), False
    ticks = count(1)
    # The ranks that wait for this one show no progress meanwhile.
    limits = Limits(whole=min(Limits.whole, run.recipe.watchdog.other / 2))
    timed = not run.recipe.deterministic
    verdict = examine_kernels(
        subject, gpu, timed=timed, limits=limits, tick=lambda: link.beat(0, "trying kernels", next(ticks))
    )
    if not verdict.tried:  # no trial was made, as on a full GPU; the next start tries again
        return verdict, True
    store.put_if_absent(key, verdict.model_dump_json(indent=1).encode())
    return KernelVerdict.model_validate_json(store.get(key)), True


def record_kernels(journal: RankJournal, verdicts: Sequence[KernelVerdict]) -> None:
    """Record an event for each kind of GPU, and show a line about each kernel that was left out."""
    for verdict in verdicts:
        out = [one.model_dump(mode="json", exclude={"right"}) for one in verdict.left_out]
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
        for one in verdict.left_out:
            versions = f"torch {version('torch')}, Triton {triton_release() or 'none'}"
            journal.note(
                f"{one.place} on {verdict.gpu}, {versions}, runs by {_used(verdict, one)} without {_verdict_text(one)}"
            )
        if verdict.ended:
            journal.note(f"the trial of kernels on {verdict.gpu} was ended early: {verdict.ended}")


def _kernel_title(one: TrialRecord) -> str:
    return one.kernel if one.place == "attention" else f"{one.place} {one.kernel}"


def _used(verdict: KernelVerdict, one: TrialRecord) -> str:
    """Return which kernel computes in place of one that was left out."""
    attention = verdict.dropped if one.dropped else verdict.plain
    order = attention if one.place == "attention" else verdict.elsewhere.get(one.place, ())
    return f"`{order[0]}`" if order else "torch"


def _verdict_text(one: TrialRecord) -> str:
    where = " with dropout" if one.dropped else ""
    why = one.failure or f"its results are {one.error or float('inf'):.1e} off, the limit is {one.bound:.1e}"
    return f"the kernel `{one.kernel}`{where}: {why}"
