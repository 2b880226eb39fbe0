"""Which kernels of attention the ranks of a run use on GPUs: tried once for each kind of GPU, and kept with the run.

The first rank on each kind tries those that the recipe's networks need (`encoder_core/cost/kernel_trial.py`). What it
finds lies in the run under the name of all that it depends on, so every later start uses the same kernels, without a
trial. A kernel at which two starts ended is left out, too. On a CPU nothing is tried: the tests hold those kernels to
the formula.
"""

import hashlib
import json
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, JsonValue

from checkpoints.gather import Peers
from data_service.store.base import Store
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.cost.trial_network import Subject
from encoder_core.layers.kernel_choice import Kernel, Preference, prefer
from launcher.preflight.collective import installed
from launcher.preflight.kernels import KernelVerdict, TrialRecord, examine_kernels, gpu_here, subject_of
from launcher.rank.journal import Link, RankJournal
from launcher.run.record import Run

FOLDER = "kernels"
_ENDS = 2  # starts that ended while they tried a kernel, after which it is left out


class _Begun(BaseModel):
    """Starts that began to try a kernel and did not come to its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    starts: int


def settle_kernels(run: Run, tokenizer: Tokenizer, peers: Peers, link: Link) -> list[KernelVerdict]:
    """From here on this process computes attention by the kernels found for its GPU. Returns what was tried just now,
    the same on all ranks. Collective.

    Raises StoreError.
    """
    gpu = gpu_here()
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    subject = subject_of(run.recipe, config)
    name = None if gpu is None else _name(gpu, subject)
    names = peers.all_gather(name)
    if not any(names):
        return []
    kept = None
    if name is not None and gpu is not None and names.index(name) == peers.rank:
        kept, new = _verdict(run.store, name, gpu, subject, link, timed=not run.recipe.deterministic)
    mine: JsonValue = None if kept is None else {"verdict": kept.model_dump(mode="json"), "new": new}
    found = peers.all_gather(mine)
    if name is not None:
        told = found[names.index(name)]
        assert isinstance(told, dict)
        verdict = KernelVerdict.model_validate(told["verdict"])
        prefer(Preference(verdict.plain, verdict.dropped))
    return [
        KernelVerdict.model_validate(told["verdict"])
        for told in found
        if isinstance(told, dict) and told["new"]
    ]


def _name(gpu: str, subject: Subject) -> str:
    """Of all that a verdict depends on."""
    what = {
        "gpu": gpu,
        "installed": installed(),
        "networks": [network.model_dump(mode="json") for network in subject.networks],
        "rows": [str(subject.dtype), subject.rows, subject.length],
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


def _verdict(
    store: Store, name: str, gpu: str, subject: Subject, link: Link, *, timed: bool
) -> tuple[KernelVerdict, bool]:
    """The run's for this name, and whether it was found just now."""
    key = f"{FOLDER}/{name}.json"
    if store.size(key) is not None:
        return KernelVerdict.model_validate_json(store.get(key)), False
    begun = {kernel: _begun(store, name, kernel) for kernel in _KERNELS}
    fatal = {
        kernel: f"{starts} starts ended while it was tried"
        for kernel, starts in begun.items()
        if starts >= _ENDS
    }

    def began(kernel: Kernel) -> None:
        link.beat(0, "trying kernels", 1 + _KERNELS.index(kernel))
        store.put(_trying(name, kernel), _Begun(starts=begun[kernel] + 1).model_dump_json().encode())

    verdict = examine_kernels(subject, gpu, fatal, began, timed=timed)
    store.put_if_absent(key, verdict.model_dump_json(indent=1).encode())
    store.delete_many([_trying(name, kernel) for kernel in _KERNELS])
    return KernelVerdict.model_validate_json(store.get(key)), True


_KERNELS: Sequence[Kernel] = ("flash", "flash3", "fused", "blocked", "padded", "written")


def _trying(name: str, kernel: Kernel) -> str:
    return f"{FOLDER}/{name}-{kernel}.trying"


def _begun(store: Store, name: str, kernel: Kernel) -> int:
    key = _trying(name, kernel)
    return 0 if store.size(key) is None else _Begun.model_validate_json(store.get(key)).starts


def record_kernels(journal: RankJournal, verdicts: Sequence[KernelVerdict]) -> None:
    """An event for each kind of GPU, and a line about what was left out."""
    for verdict in verdicts:
        out = [one.model_dump(mode="json", exclude={"right"}) for one in verdict.left_out]
        seconds = {one.kernel: one.seconds for one in verdict.tried if one.seconds is not None}
        journal.event(
            "kernels",
            gpu=verdict.gpu,
            plain=list(verdict.plain),
            dropped=list(verdict.dropped),
            left_out=out,
            seconds=seconds,
        )
        for one in verdict.left_out:
            journal.note(f"attention on {verdict.gpu} without {_said(one)}")


def _said(one: TrialRecord) -> str:
    where = " with dropout" if one.dropped else ""
    why = one.failure or f"its gradients are {one.error or float('inf'):.1e} off, {one.bound:.1e} may be"
    return f"the kernel `{one.kernel}`{where}: {why}"
