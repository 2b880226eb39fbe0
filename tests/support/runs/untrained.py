"""Runs with records and checkpoints of which nobody trained a step.

`Attempt` records steps with a real journal and commits small tensors. `Committing` commits weights of the recipe's own
model. `ToldRun` is only looked at: its files are written by hand.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

from checkpoints.attempt import Owner, claim
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind, list_committed, read_manifest, record_rewind
from checkpoints.retention import delete_expired
from checkpoints.save import Saver
from data_service.store.base import Store
from encoder_core.train.zero_state import KINDS, Fragment
from launcher.runtime.rank.build import build_model
from launcher.runtime.run.log import RunLog, evaluation_record
from launcher.runtime.run.record import open_run
from launcher.runtime.run.segments import EVENTS, METRICS, segment_key


class Attempt:
    """Goes on from the newest checkpoint. Every fourth step is followed by an evaluation; values tell who made them."""

    def __init__(self, store: Store) -> None:
        marks = list_committed(store)
        self.store, self.attempt = store, claim(store, owner=Owner.for_this_process(0.0))
        self.saver = Saver(store, self.attempt, SingleRank(), resumed=read_manifest(store, marks[0]) if marks else None)
        self.journal = RunLog(store, self.attempt.number, 1000.0)
        self.step = marks[0].step if marks else 0
        self.journal.event("resume" if marks else "start", float(self.attempt.number), step=self.step)

    def train(self, stop: int) -> "Attempt":
        for step in range(self.step, stop):
            self.journal.add_metrics(step_record(step, self.attempt.number))
            if (step + 1) % 4 == 0:
                figures = {"mlm_loss": 2.0 + self.attempt.number / 8, "loss": 20.0 + step}
                self.journal.add_metrics(evaluation_record(step + 1, figures))
        self.step = stop
        return self

    def commit(self) -> CheckpointName:
        self.journal.flush()
        tensors = {kind: torch.zeros(4) for kind in ("master", "exp_avg", "exp_avg_sq")}
        self.saver.begin(self.step, [Fragment("w", 0, tensors)], {"w": (4,)}, {"step": self.step})
        self.saver.wait_for_all(lambda sent: None)
        self.saver.commit()
        return CheckpointName(self.attempt.number, self.step)

    def die(self) -> None:
        """With what it had recorded since its last commit."""
        self.journal.event("death", float(self.attempt.number), step=self.step, reason="a cosmic ray")

    def go_back(self, to: CheckpointName) -> None:
        gone = Rewind(attempt=self.attempt.number, to=to, began=to.step, reached=self.step, cause="loss", skips=())
        record_rewind(self.store, gone, self.attempt)
        self.journal.event("rewind", float(self.attempt.number), step=self.step, cause="the loss went bad")


def step_record(step: int, attempt: int) -> dict[str, object]:
    """As `StepReport.to_record` makes them; a skipped step's loss is not finite."""
    return {
        "kind": "step",
        "step": step,
        "loss": float("nan") if step == 5 else 10 * attempt + step / 7,
        "mlm_loss": 1 + step / 3,
        "rtd_loss": attempt / 3,
        "tokens": 1000 + step,
        "targets": 150,
        "lr": 1e-3 / (step + 1),
        "grad_norm": 0.5,
        "skipped": step == 5,
        "seconds": 0.25,
        "data_wait": 0.05,
        "data_wait_share": 0.2,
        "samples": [[0, step, step + 1]],
        "digest": step,
    }


_RECIPE = """
name: base
corpus: {sources: {text: {uri: "s3://bucket/corpus"}}}
tokenizer: {uri: "s3://bucket/tokenizer"}
phases: [{steps: 1000}]
"""
_RECORD = {
    "format": 2,
    "name": "base",
    "created": "2026-11-22T12:00:00+00:00",
    "identity": {},
    "fingerprint": "ab" * 32,
    "inputs": {"corpora": {"text": "c0" * 32}, "tokenizer": "be" * 32},
    "versions": {"maskfleet": "1.0"},
}


class ToldRun:
    """A run at `folder` whose records are written by hand. `origins`: what it was forked from."""

    def __init__(self, folder: Path, **record: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(_RECIPE)
        (folder / "run.json").write_text(json.dumps({**_RECORD, **record}))
        self._written: dict[tuple[str, int], int] = {}

    def begin(self, attempt: int, step: int = 0, now: float | None = None) -> None:
        """Somebody elsewhere claims an attempt, and shows that it lives."""
        now = time.time() if now is None else now
        owner = {"host": "node-7", "processes": "elsewhere", "pid": 12, "started": now, "claimed": now}
        self._put(f"attempts/{attempt:06d}.json", json.dumps(owner))
        self._put(f"attempts/{attempt:06d}.heartbeat.json", json.dumps({"time": now, "beat": 1}))
        kind = "resume" if step else "start"
        self.event(kind, attempt, time=now, step=step, world=2, **({"attempt_of": attempt - 1} if step else {}))

    def steps(self, attempt: int, first: int, stop: int, **fields: Any) -> None:
        """One more segment."""
        self._segment(METRICS, attempt, [_told_step(step, **fields) for step in range(first, stop)])

    def evaluation(self, attempt: int, step: int, loss: float) -> None:
        record = {"kind": "evaluation", "step": step, "loss": loss, "mlm_loss": loss, "perplexity": 2.0**loss}
        self._segment(METRICS, attempt, [record])

    def event(self, kind: str, attempt: int = 0, **fields: Any) -> None:
        told = {"time": time.time(), "kind": kind, "attempt": attempt, **fields}
        self._segment(EVENTS, attempt, [told])

    def _segment(self, folder: str, attempt: int, records: list[dict[str, Any]]) -> None:
        number = self._written.get((folder, attempt), 0)
        self._written[folder, attempt] = number + 1
        self._put(segment_key(folder, attempt, number), "".join(json.dumps(one) + "\n" for one in records))

    def _put(self, key: str, text: str) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(".part").write_text(text)
        path.with_name(".part").replace(path)


def _told_step(step: int, **fields: Any) -> dict[str, Any]:
    usual = {"kind": "step", "step": step, "loss": 9.0 - step / 1000, "mlm_loss": 9.0 - step / 1000}
    usual |= {"tokens": 1000, "lr": 1e-3, "grad_norm": 1.0, "skipped": False, "seconds": 2.0}
    return usual | {"data_wait": 0.1, "data_wait_share": 0.05} | fields


class Committing:
    """One attempt of a run, which commits at the steps it is told to."""

    def __init__(self, uri: str) -> None:
        self.run = open_run(uri)
        self.attempt = claim(self.run.store, owner=Owner.for_this_process(0.0))
        self._saver = Saver(self.run.store, self.attempt, SingleRank())
        self._model = build_model(self.run.recipe, self.run.tokenizer())

    def commit(self, step: int) -> CheckpointName:
        """Weights that depend on `step` alone."""
        shapes, fragments = {}, []
        for name, parameter in self._model.named_parameters():
            draw = torch.Generator().manual_seed(step)
            moved = parameter.detach() + 0.02 * torch.randn(parameter.shape, generator=draw)
            shapes[name] = tuple(parameter.shape)
            fragments.append(Fragment(name, 0, dict.fromkeys(KINDS, moved.flatten())))
        self._saver.begin(step, fragments, shapes, {"step": step})
        self._saver.wait_for_all(lambda sent: None)
        self._saver.commit()
        return CheckpointName(self.attempt.number, step)

    def keep_last(self, count: int) -> None:
        """Delete all but the newest `count`."""
        delete_expired(self.run.store, self.attempt, keep_last=count, keep_every=None)
