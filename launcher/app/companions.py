"""Companions of every training that a command starts: the sinks of its records, and the evaluation of committed
checkpoints.
"""

from launcher.after.diagnose.evaluators import evaluate_commits, is_evaluation_pending
from launcher.observe.sinks.process import publish_run
from launcher.runtime.cluster.train import CompanionServices

TRAINING_COMPANIONS = CompanionServices(
    publishing=lambda run, note: publish_run(run.store, run.recipe, note),
    evaluating=evaluate_commits,
    pending=is_evaluation_pending,
)
