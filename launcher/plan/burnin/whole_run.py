"""A real run: `maskfleet train` is killed in the middle, and resumes to the same bits as an undisturbed run."""

import os
import subprocess
import sys
import time
from pathlib import Path

from checkpoints.listing import committed, read_manifest
from data_service.store.open import open_store
from launcher.plan.burnin.check import Bench
from launcher.plan.measure.measure import prepare
from launcher.plan.measure.trial import Trial
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.operation import Events
from launcher.runtime.recipe.schema import (
    BatchSize,
    Checkpointing,
    Every,
    EverySteps,
    Logging,
    Recipe,
    RecipeEvaluation,
    RecipePhase,
)
from launcher.runtime.recipe.summary import known
from launcher.runtime.recipe.tiny import tiny

_STEPS, _SAVES, _ROWS, _LENGTH = 60, 10, 32, 32
_POLL_S, _LIMIT_S = 0.2, 280.0


def killed_and_resumed(bench: Bench) -> None:
    """Check that an undisturbed and a killed run of one recipe end with the same bytes in their last checkpoints."""
    ends = {}
    for name in ("undisturbed", "killed"):
        folder = bench.folder / name
        folder.mkdir()
        uri = prepare(Trial(_recipe(bench), 1, 1, (), 0, None), str(folder))
        if name == "killed":
            with bench.report.attempt("the command is killed"):
                step = _kill_after_a_commit(uri, folder)
                bench.report.holds("it is killed before its end", step < _STEPS, f"step {step}")
        began = time.monotonic()
        code, said = _train(uri, folder)
        bench.report.holds(
            f"{name}: train ends with exit code 0", code == 0, f"{code} {said if code else ''}"
        )
        if code:
            return
        bench.report.figure(f"{name}: train took", time.monotonic() - began, "s")
        ends[name] = _last(uri)
    bench.report.holds("both end at the last step", {step for step, _ in ends.values()} == {_STEPS})
    bench.report.holds(
        "the same bytes of weights and moments", len({hashes for _, hashes in ends.values()}) == 1
    )


def _recipe(bench: Bench) -> Recipe:
    recipe = tiny(load("roberta-base"))
    steps = EverySteps(steps=_STEPS)
    ranks = 2 if not bench.gpu else 1
    changes = {
        "model": known(recipe.model).model_copy(update={"vocab": 2048}),
        "phases": (RecipePhase(steps=_STEPS, length=_LENGTH, batch=BatchSize(sequences=_ROWS)),),
        "microbatch": _ROWS // 2,
        "trainers": ranks,
        "schedule": recipe.schedule.model_copy(update={"warmup": _SAVES}),
        "precision": "bf16",
        "deterministic": True,
        "checkpoint": Checkpointing(every=Every(steps=_SAVES), keep_last=2),
        "evaluation": RecipeEvaluation(every=steps, samples=1),
        "logging": Logging(tensorboard=False),
        "events": Events(),
    }
    return recipe.model_copy(update=changes)


def _command(uri: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "maskfleet", "train", uri],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TRITON_INTERPRET": "0"},
        )


def _train(uri: str, folder: Path) -> tuple[int, str]:
    """Train the run; return the exit code and the last output."""
    log = folder / "train.log"
    process = _command(uri, log)
    try:
        return process.wait(_LIMIT_S), log.read_text("utf-8", errors="replace")[-400:]
    finally:
        process.kill()
        process.wait()


def _kill_after_a_commit(uri: str, folder: Path) -> int:
    """Kill training after a commit, and return the newest commit's step.

    Raises:
        TimeoutError: the command ended, or the time was up, before a commit.
    """
    process, end = _command(uri, folder / "killed.log"), time.monotonic() + _LIMIT_S
    try:
        while not (marks := committed(open_store(uri))):
            if process.poll() is not None or time.monotonic() > end:
                said = (folder / "killed.log").read_text("utf-8", errors="replace")[-400:]
                raise TimeoutError(f"no commit before the command ended: {said}")
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    return max(mark.step for mark in marks)


def _last(uri: str) -> tuple[int, tuple[str, ...]]:
    """Return step and hashes of the newest checkpoint."""
    store = open_store(uri)
    newest = max(committed(store), key=lambda mark: mark.step)
    manifest = read_manifest(store, newest)
    return newest.step, tuple(digest for file in manifest.files for digest in file.hashes)
