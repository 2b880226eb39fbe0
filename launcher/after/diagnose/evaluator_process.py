"""The Ray actor that evaluates a run's commits (committed checkpoints). `diagnose/evaluators.py` starts it.

It imports torch and the measures only when it evaluates, because the imports take seconds of CPU time from training.
"""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.layout import CheckpointName
    from launcher.runtime.recipe.schema import Recipe

_CORES_PER_EVALUATOR_CORE = 4  # an evaluator uses a quarter of its node's cores


class EvaluatorProcess:
    """The actor that evaluates commits. With `idle`, it uses only CPU time that no other process needs (the scheduling
    policy SCHED_IDLE).

    A high niceness is not enough: in a Ray that somebody else started, ranks may have niceness 15. On a core that such
    a rank uses, a process of niceness 19 still gets a third of the time. SCHED_IDLE gets a twelfth, and yields at once.
    """

    def __init__(self, *, idle: bool) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides no GPU from an actor that asks for none
        if not idle:
            return
        try:
            # This thread, and the threads that it starts, get the lowest priority.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # a sandbox may forbid the call
            os.nice(19)

    def evaluate(self, uri: str, recipe: "Recipe", checkpoint_name: "CheckpointName") -> dict[str, Any]:
        """Evaluate a commit (`launcher.after.diagnose.evaluate.evaluate_commit`). Return the outcome as plain data,
        with the `seconds` that it took."""
        from dataclasses import asdict, replace

        import torch

        from launcher.after.diagnose.evaluate import evaluate_commit
        from launcher.runtime.run.record import open_run

        began = time.monotonic()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // _CORES_PER_EVALUATOR_CORE))
        run = replace(open_run(uri), recipe=recipe)
        outcome = evaluate_commit(run, checkpoint_name, recipe.evaluation.tasks)
        return asdict(outcome) | {"seconds": time.monotonic() - began}
