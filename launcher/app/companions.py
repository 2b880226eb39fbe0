"""Services that run next to every training: publishing its records to sinks, and evaluating committed checkpoints."""

from launcher.after.diagnose.evaluators import evaluate_commits, is_evaluation_pending
from launcher.observe.sinks.process import publish_run
from launcher.runtime.cluster.train import CompanionServices

TRAINING_COMPANIONS = CompanionServices(
    publishing=lambda run, note: publish_run(run.store, run.recipe, note),
    evaluating=evaluate_commits,
    pending=is_evaluation_pending,
)
