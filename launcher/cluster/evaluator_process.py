"""The process that evaluates commits, an actor of Ray that `launcher.cluster.evaluators` starts.

It imports what it needs in its methods: that takes seconds of a core, which it is to take from nobody.
"""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.layout import CheckpointName
    from launcher.recipe.schema import Recipe

_SHARE = 4  # of a node's cores, one in so many


class EvaluatorProcess:
    """With `idle`, it runs when others leave a core idle. Ray's own processes, ranks included, have niceness 15, beside
    which 19 would still be a third of a core; idle scheduling (SCHED_IDLE) is a twelfth, and gives way at once."""

    def __init__(self, *, idle: bool) -> None:
        if not idle:
            return
        try:
            os.sched_setscheduler(
                0, os.SCHED_IDLE, os.sched_param(0)
            )  # this thread, and those that it will start
        except OSError:  # a sandbox that forbids it
            os.nice(19)

    def evaluate(self, uri: str, recipe: "Recipe", mark: "CheckpointName") -> dict[str, Any]:
        """See `launcher.diagnose.evaluate.evaluate_commit`: its outcome as plain data, and the `seconds` it took."""
        from dataclasses import asdict, replace

        import torch

        from launcher.diagnose.evaluate import evaluate_commit
        from launcher.run.record import open_run

        began = time.monotonic()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // _SHARE))
        run = replace(open_run(uri), recipe=recipe)
        outcome = evaluate_commit(run, mark, recipe.evaluation.tasks)
        return asdict(outcome) | {"seconds": time.monotonic() - began}
