"""What was measured beside training is read once, object by object, however often somebody looks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.layout import CheckpointName
from data_service.store.base import Entry
from data_service.store.local import LocalStore
from launcher.observe.inspect.report.task_table import RowReader, TableRow, keep_rows, kept_rows
from launcher.observe.watch.reader import RunReader
from launcher.runtime.recipe.evaluation import EvaluationTask, HeldOutSettings
from launcher.runtime.run.evaluations import (
    DiagnosticCell,
    DiagnosticResult,
    EvaluationReader,
    Figure,
    evaluated,
    write_commit,
    write_result,
)
from tests.support.runs.untrained import ToldRun

KINDS = ("result", "commit", "row", "damage", "delete", "look")
DEEDS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=20)


@dataclass(frozen=True)
class CountingStore(LocalStore):
    """A folder that notes every object it is asked for, and every listing."""

    asked: list[str] = field(default_factory=list, compare=False)
    listings: list[str] = field(default_factory=list, compare=False)

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return super().get(key)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self.listings.append(prefix)
        return super().list(prefix)


def result(weights: int, seed: int = 0, value: float = 0.5) -> DiagnosticResult:
    task = EvaluationTask(heldout=HeldOutSettings())
    cell = DiagnosticCell(weights=f"{weights:064x}", task=task, data="d" * 64, seed=seed)
    return DiagnosticResult(cell=cell, figures=(Figure(measure="accuracy", value=value),), seconds=1.0)


def row(step: int, median: float) -> TableRow:
    return TableRow.model_validate(
        {
            "checkpoint": "runs/base",
            "step": step,
            "weights": f"{step:064x}",
            "task": "sst2",
            "data": "d" * 64,
            "measure": "finetune",
            "metric": "accuracy",
            "settings": {},
            "choices": 1,
            "median": median,
            "lowest": median,
            "highest": median,
            "values": {0: median},
            "metrics": {"accuracy": median},
            "cells": 1,
            "missing": 0,
        }
    )


class Deeds:
    """A run's store, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.store = CountingStore(folder)
        self.evaluations, self.rows = EvaluationReader(self.store), RowReader(self.store)
        self.count = 0

    def do(self, what: str, which: int) -> None:
        self.count += 1
        match what:
            case "result":
                write_result(self.store, result(which % 3, seed=which))
            case "commit":
                write_commit(self.store, CheckpointName(1 + which % 2, 10 * which), f"{which % 3:064x}")
            case "row":  # a later command's table takes the place of an earlier one's
                keep_rows(self.store, [row(which, 1 / self.count)])
            case "damage" | "delete":
                self._spoil(what, which)
            case "look":
                self.look()

    def _spoil(self, what: str, which: int) -> None:
        keys = [entry.key for entry in self.store.list()]
        if not keys:
            return
        key = keys[which % len(keys)]
        if what == "damage":
            self.store.put(key, b"nonsense %d" % self.count)
        else:
            self.store.delete(key)

    def look(self) -> None:
        """What is known is what a fresh look finds."""
        assert self.evaluations.read() == evaluated(self.store)
        assert self.rows.read() == kept_rows(self.store)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(deeds=DEEDS)
def test_what_is_known_is_what_a_fresh_look_finds(deeds: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder:
        run = Deeds(Path(folder))
        for what, which in deeds:
            run.do(what, which)
        run.look()


def test_a_look_asks_for_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    ToldRun(tmp_path).begin(1)
    store, now = CountingStore(tmp_path), [0.0]
    reader = RunReader(str(tmp_path), store, clock=lambda: now[0])

    def look() -> tuple[list[str], list[str]]:
        """After half a minute: the objects that were asked for, and the listings made, of evaluations and tables."""
        now[0] += 31
        store.asked.clear()
        store.listings.clear()
        subject = reader.read().subject
        assert list(subject.beside) == evaluated(LocalStore(tmp_path))
        assert subject.evaluated == kept_rows(LocalStore(tmp_path))
        about = ("evaluations/", "tables/")
        return [key for key in store.asked if key.startswith(about)], [
            prefix for prefix in store.listings if prefix.startswith(about)
        ]

    for step in range(1, 6):
        write_commit(store, CheckpointName(1, step), f"{step:064x}")
        write_result(store, result(step))
        keep_rows(store, [row(step, 0.5)])
    asked, listings = look()
    assert len(asked) == 15
    assert len(set(asked)) == 15, "five commits, results and rows, each once"
    assert listings == ["evaluations/", "tables/"], "however many commits there are"
    assert look() == ([], listings)

    write_commit(store, CheckpointName(1, 6), f"{6:064x}")
    new = result(6)
    write_result(store, new)
    keep_rows(store, [row(2, 0.75)])
    changed = [f"evaluations/commits/step-{6:08d}-a000001.json", new.path, row(2, 0.75).path]
    assert look() == (changed, listings)
    assert look() == ([], listings)
