"""Trials whose kernels misbehave in every way: they come to their end, and only the culprit is left out."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from encoder_core.families.bert import BertConfig
from encoder_core.trials.compile_trial import try_in_process
from encoder_core.trials.kernel_trial import KernelTrial, Limits, TriedKernel, build_preference, try_kernels
from encoder_core.trials.trial_network import TrialSubject
from encoder_core.trials.trial_process import Deadline, TrialEnded, run_trial_process
from tests.support.ranks.bad_kernels import RIGHT, Misbehaviour, tried_with

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NETWORK = BertConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=48)
SUBJECT = TrialSubject((NETWORK,), torch.float32, torch.device("cpu"), rows=2, length=24)
HANG_S = 15.0  # on a busy machine a right kernel needs much less
CULPRITS = ("blocked", "padded")
ERRORS = [
    "RuntimeError", "ValueError", "MemoryError", "OSError", "Exception", "StopIteration", "GeneratorExit", "SystemExit",
    "KeyboardInterrupt", "BaseException", "tests.support.ranks.bad_kernels:Unheard",
]  # fmt: skip
TRITONS = [f"triton.runtime.errors:{name}" for name in ("OutOfResources", "PTXASError")]
DEADLY = [
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGKILL,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTERM,
]
HANGS = ["asleep", "busy", "stopped", "holding Python's lock"]
CHANGES = ["dtype", "threads", "deterministic", "gradients", "precision", "a thread"]
HARMLESS = ["close output", "print", "leave a process"]
RESEEDS = "numbers"  # harmless where nothing is drawn


NOTHING = st.none()


def way(name: str, arguments: st.SearchStrategy[Any] = NOTHING) -> st.SearchStrategy[Misbehaviour]:
    return st.builds(
        Misbehaviour,
        kernel=st.sampled_from(CULPRITS),
        way=st.just(name),
        argument=arguments,
        call=st.integers(1, 2),  # of a third, a process started for the second unit alone knows nothing
    )


misbehaviours = st.one_of(
    way("wrong"),
    way("nan"),
    way("raise", st.sampled_from(ERRORS)),
    way("hang", st.sampled_from(HANGS)),
    way("exit", st.integers(0, 255)),
    way("die", st.sampled_from(DEADLY)),
    way("abort"),
    way("segfault"),
    way("allocate"),
    way("scribble"),
    way("close everything"),
    way("close output"),
    way("change", st.sampled_from([*CHANGES, RESEEDS])),
    way("print", st.integers(1, 8)),
    way("leave a process"),
)


def trial(how: Misbehaviour, **others: Any) -> KernelTrial:
    limits = Limits(start=300.0, kernel=HANG_S, whole=500.0)
    with tried_with(how):
        return try_kernels(SUBJECT, timed=False, limits=limits, **others)


@pytest.fixture(scope="module")
def undisturbed() -> KernelTrial:
    return trial(RIGHT)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def ensure_only_the_culprit_is_out(how: Misbehaviour, undisturbed: KernelTrial) -> list[TriedKernel]:
    """Returns what was found of the culprit."""
    before = children(), len(os.listdir("/proc/self/fd")), torch.random.get_rng_state()
    found = trial(how)
    after = children(), len(os.listdir("/proc/self/fd")), torch.random.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert not found.ended
    innocent = [one for one in found.tried if one.kernel != how.kernel]
    assert innocent == [one for one in undisturbed.tried if one.kernel != how.kernel]
    culprit = [one for one in found.tried if one.kernel == how.kernel]
    assert [replace(one, error=None, failure="") for one in culprit] == [
        replace(one, error=None) for one in undisturbed.tried if one.kernel == how.kernel
    ]
    order = build_preference(found.tried)
    harmless = how.way in HARMLESS
    if how.argument != RESEEDS:
        assert (how.kernel in order.plain, how.kernel in order.dropped) == (harmless, harmless)
    return culprit


LISTED = {
    "an error of Triton": (Misbehaviour("padded", "raise", TRITONS[0]), "OutOfResources: "),
    "the end of the process": (Misbehaviour("padded", "raise", "SystemExit"), "SystemExit: "),
    "1 % off": (Misbehaviour("blocked", "wrong"), ""),
    "killed": (Misbehaviour("padded", "die", signal.SIGKILL), "its process was killed by SIGKILL"),
    "segfault": (Misbehaviour("blocked", "segfault", None, 2), "its process was killed by SIGSEGV"),
    "a code": (Misbehaviour("blocked", "exit", 0), "its process ended with exit code 0"),
    "hangs": (
        Misbehaviour("padded", "hang", "holding Python's lock"),
        f"it was not done after {HANG_S:.0f} s",
    ),
    "settings": (Misbehaviour("padded", "change", "dtype"), "it changed torch's default dtype"),
    "memory": (Misbehaviour("padded", "allocate"), "RuntimeError: "),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "killed" else pytest.mark.long) for case in LISTED],
)
def test_only_the_culprit_is_left_out_and_its_end_is_on_record(case: str, undisturbed: KernelTrial) -> None:
    how, words = LISTED[case]
    if how.argument in TRITONS:
        pytest.importorskip("triton")
    found = ensure_only_the_culprit_is_out(how, undisturbed)
    assert all(one.failure.startswith(words) for one in found)
    assert words or all(one.error is not None and one.error > 100 * one.bound for one in found)


DAMAGE = ("raise", "hang", "exit", "die", "abort", "segfault", "allocate", "scribble", "close everything")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 30))])
def test_whatever_a_compiler_does_is_only_on_record(seed: int) -> None:
    draw = random.Random(seed)
    arguments: dict[str, Sequence[str | int | None]] = {
        "raise": [*ERRORS, *TRITONS],
        "hang": HANGS,
        "exit": range(256),
        "die": DEADLY,
    }
    name = draw.choice(DAMAGE)
    how = Misbehaviour("compiler", name, draw.choice(arguments.get(name, [None])))
    before = children(), len(os.listdir("/proc/self/fd"))
    with tried_with(how):
        found = try_in_process(SUBJECT, HANG_S, lambda: None)
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
    assert not found.is_right
    assert found.failure


@pytest.mark.long
def test_a_process_goes_with_the_one_that_started_it() -> None:
    """Killed, it cannot see to that itself."""
    code = (
        "from tests.encoder_core.trials.test_trial_process import trial\n"
        "from tests.support.ranks.bad_kernels import Misbehaviour\n"
        "trial(Misbehaviour('padded', 'kill the rank'))"
    )
    rank = subprocess.Popen([sys.executable, "-c", code])
    assert rank.wait(300) == -signal.SIGKILL
    assert gone(str(rank.pid))


def gone(argument: str) -> bool:
    """Whether no process has that argument any more, or is soon without."""
    left = [process for process in psutil.process_iter() if argument in cmdline(process)]
    return not psutil.wait_procs(left, timeout=30)[1]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.long
def test_what_a_process_prints_is_its_last_words() -> None:
    target = "tests.support.ranks.bad_kernels:serve_compiler"
    with (
        tried_with(Misbehaviour("compiler", "raise", "Exception")),
        closing(run_trial_process(target, {}, Deadline(300.0), lambda: None)) as reports,
        pytest.raises(TrialEnded) as end,
    ):
        next(reports)
    assert "a library says so" in str(end.value)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=80, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(misbehaviours)
def test_whatever_kernels_do_only_those_are_left_out(undisturbed: KernelTrial, how: Misbehaviour) -> None:
    ensure_only_the_culprit_is_out(how, undisturbed)
