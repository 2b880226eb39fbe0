"""Runs as their stores tell of them: attempts that record steps with a real journal, and commit; nothing is trained."""

import torch

from checkpoints.attempt import Owner, claim
from checkpoints.gather import Alone
from checkpoints.layout import CheckpointName
from checkpoints.listing import committed, read_manifest
from checkpoints.rewind import Rewind, record
from checkpoints.save import Saver
from data_service.store.base import Store
from encoder_core.train.zero_state import Fragment
from launcher.run.log import RunLog, evaluation_record


class Attempt:
    """Goes on from the newest checkpoint. Every fourth step is followed by an evaluation; values tell who made them."""

    def __init__(self, store: Store) -> None:
        marks = committed(store)
        self.store, self.attempt = store, claim(store, owner=Owner.here(0.0))
        self.saver = Saver(
            store, self.attempt, Alone(), resumed=read_manifest(store, marks[0]) if marks else None
        )
        self.journal = RunLog(store, self.attempt.number, 1000.0)
        self.step = marks[0].step if marks else 0
        self.journal.event("resume" if marks else "start", float(self.attempt.number), step=self.step)

    def train(self, stop: int) -> "Attempt":
        for step in range(self.step, stop):
            self.journal.metric(step_record(step, self.attempt.number))
            if (step + 1) % 4 == 0:
                figures = {"mlm_loss": 2.0 + self.attempt.number / 8, "loss": 20.0 + step}
                self.journal.metric(evaluation_record(step + 1, figures))
        self.step = stop
        return self

    def commit(self) -> CheckpointName:
        self.journal.flush()
        tensors = {kind: torch.zeros(4) for kind in ("master", "exp_avg", "exp_avg_sq")}
        self.saver.begin(self.step, [Fragment("w", 0, tensors)], {"w": (4,)}, {"step": self.step})
        self.saver.wait()
        self.saver.commit()
        return CheckpointName(self.attempt.number, self.step)

    def die(self) -> None:
        """With what it had recorded since its last commit."""
        self.journal.event("death", float(self.attempt.number), step=self.step, reason="a cosmic ray")

    def go_back(self, to: CheckpointName) -> None:
        gone = Rewind(
            attempt=self.attempt.number, to=to, began=to.step, reached=self.step, cause="loss", skips=()
        )
        record(self.store, gone, self.attempt)
        self.journal.event("rewind", float(self.attempt.number), step=self.step, cause="the loss went bad")


def step_record(step: int, attempt: int) -> dict[str, object]:
    """As `StepReport.record` makes them; a skipped step's loss is not finite."""
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
