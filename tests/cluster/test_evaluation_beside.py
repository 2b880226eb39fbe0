"""`maskfleet train` with and without evaluation beside it, evaluators killed all the while."""

import random
import threading
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from launcher.after.diagnose.evaluators import is_evaluation_pending
from launcher.observe.inspect.report.page import write_report
from launcher.runtime.run.evaluations import evaluated_commits
from launcher.runtime.run.record import open_run
from tests.support.runs import small_runs
from tests.support.runs.train_command import output, titled, training
from tests.support.tasks.small_tasks import task_files

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(2400)]

STEPS = 400
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 64, batch: {{sequences: 32}}}}]",
    "model.hidden=64",
    "model.feed_forward=256",
    "checkpoint={every: {steps: 100}, keep_last: 1}",
    "logging={flush_seconds: 1, tensorboard: false}",
    "trainers=1",
)
EVALUATION = "evaluation={{every: {{steps: 100}}, samples: 20{tasks}}}"


class Killer(threading.Thread):
    """Kills the command's evaluators, each some seconds after it was seen first; the last ones live."""

    def __init__(self, process: object, most: int) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self.killed, self.over = process, most, 0, threading.Event()

    def run(self) -> None:
        draw = random.Random(1)
        while self.killed < self.most and not self.over.wait(draw.uniform(0.5, 6)):
            for found in titled(self.process, "ray::EvaluatorProcess"):  # type: ignore[arg-type]
                try:
                    found.kill()
                    self.killed += 1
                except psutil.NoSuchProcess:
                    continue


def train(uri: str, kills: int) -> int:
    """To the end; how many evaluators were killed."""
    with training(uri) as process:
        killer = Killer(process, kills)
        killer.start()
        try:
            assert process.wait(1500) == 0, output(process)
        finally:
            killer.over.set()
            killer.join()
    return killer.killed


def test_evaluation_changes_nothing_of_the_run(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=200)
    word, shared = task_files(str(tmp_path))
    tasks = f", tasks: [heldout, {{probe: {{task: '{word}'}}}}, {{similarity: {{task: '{shared}'}}}}]"
    uris, killed = {}, {}
    for name, asked, kills in (("without", "", 0), ("with", tasks, 0), ("killed", tasks, 3)):
        uris[name] = small_runs.new_run(tmp_path, name, *SETTINGS, EVALUATION.format(tasks=asked))
        killed[name] = train(uris[name], kills)
    for name in ("with", "killed"):
        small_runs.ensure_same(uris[name], uris["without"], STEPS)
        assert not is_evaluation_pending(open_run(uris[name])), "the last commit is evaluated"
    assert killed["killed"] > 0
    assert not list(evaluated_commits(open_run(uris["without"]).store))
    write_report(
        open_run(uris["with"]),
        tmp_path / "page.html",
        with_baselines=False,
        now=datetime.now(UTC),
    )
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in ("Evaluation of commits", "heldout: mlm loss", "similarity shared: spearman"))
