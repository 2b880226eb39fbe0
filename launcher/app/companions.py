"""Companions of every training that a command starts: the sinks of its records, and the evaluation of committed
checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from launcher.after.diagnose.evaluators import evaluate_commits, is_evaluation_pending
from launcher.observe.sinks.process import publish_run
from launcher.runtime.cluster.ray_session import NoteFunction
from launcher.runtime.cluster.train import CompanionServices
from launcher.runtime.run.record import Run


@contextmanager
def _publish_run(run: Run, note: NoteFunction) -> Iterator[None]:
    with publish_run(run.store, run.recipe, note):
        yield


TRAINING_COMPANIONS = CompanionServices(
    publishing=_publish_run, evaluating=evaluate_commits, pending=is_evaluation_pending
)
