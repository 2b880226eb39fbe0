"""Runs as somebody sees them who only looks: a record, a recipe in outline, segments of records. Nothing is trained."""

import json
import time
from pathlib import Path
from typing import Any

from launcher.run.segments import EVENTS, METRICS, segment_key

_RECIPE = """
name: {name}
corpus: {{sources: {{text: {{uri: "s3://bucket/corpus"}}}}}}
tokenizer: {{uri: "s3://bucket/tokenizer"}}
phases: [{{steps: {steps}}}]
"""
_RECORD = {
    "format": 1,
    "name": "base",
    "created": "2026-11-22T12:00:00+00:00",
    "identity": {},
    "fingerprint": "ab" * 32,
    "inputs": {"corpora": {"text": "c0" * 32}, "tokenizer": "be" * 32},
    "versions": {"maskfleet": "1.0"},
}


class ToldRun:
    """A run at `folder` whose records are written by hand. `origins`: what it was forked from."""

    def __init__(self, folder: Path, name: str = "base", steps: int = 1000, **record: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(_RECIPE.format(name=name, steps=steps))
        (folder / "run.json").write_text(json.dumps({**_RECORD, **record}))
        self._written: dict[tuple[str, int], int] = {}

    def begin(self, attempt: int, step: int = 0, now: float | None = None) -> None:
        """Somebody elsewhere claims an attempt, and shows that it lives."""
        now = time.time() if now is None else now
        owner = {"host": "node-7", "processes": "elsewhere", "pid": 12, "started": now, "claimed": now}
        self._put(f"attempts/{attempt:06d}.json", json.dumps(owner))
        self._put(f"attempts/{attempt:06d}.heartbeat.json", json.dumps({"time": now, "beat": 1}))
        kind = "resume" if step else "start"
        self.event(
            kind, attempt, time=now, step=step, world=2, **({"attempt_of": attempt - 1} if step else {})
        )

    def steps(self, attempt: int, first: int, stop: int, **fields: Any) -> None:
        """One more segment."""
        self._segment(METRICS, attempt, [step_record(step, **fields) for step in range(first, stop)])

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


def step_record(step: int, **fields: Any) -> dict[str, Any]:
    usual = {"kind": "step", "step": step, "loss": 9.0 - step / 1000, "mlm_loss": 9.0 - step / 1000}
    usual |= {"tokens": 1000, "lr": 1e-3, "grad_norm": 1.0, "skipped": False, "seconds": 2.0}
    return usual | {"data_wait": 0.1, "data_wait_share": 0.05} | fields
