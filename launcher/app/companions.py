"""Companions of every training that a command starts: trackers, the webhook, and the evaluation of committed
checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from launcher.after.diagnose.evaluators import evaluating, pending
from launcher.observe.trackers.tracking import tracking
from launcher.observe.trackers.webhook import announcing
from launcher.runtime.cluster.supervisor import Companions, Note
from launcher.runtime.run.record import Run


@contextmanager
def _publishing(run: Run, note: Note) -> Iterator[None]:
    about = {"run": run.uri, "name": run.recipe.name}
    with announcing(run.store, run.recipe.events, about, note), tracking(run.store, run.recipe, note):
        yield


COMPANIONS = Companions(publishing=_publishing, evaluating=evaluating, pending=pending)
