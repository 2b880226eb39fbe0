"""The report's curves of held-out losses of commits, for every term that has one."""

import pytest

from launcher.observe.inspect.report.evaluations import evaluations_html
from launcher.runtime.recipe.evaluation import EvaluationTask, HeldOutSettings
from launcher.runtime.run.evaluations import (
    CommitWeights,
    DiagnosticCell,
    DiagnosticResult,
    Evaluated,
    Figure,
)


@pytest.mark.parametrize("term", ["mlm", "clm", "plm", "diffusion", "denoise", "contrastive"])
def test_losses_by_length_are_drawn(term: str) -> None:
    weights = "a" * 64
    task = EvaluationTask(heldout=HeldOutSettings())
    cell = DiagnosticCell(weights=weights, task=task, data="d" * 64, seed=0)
    figures = tuple(Figure(measure=f"{term}_{name}", value=2.5, length=128) for name in ("loss", "accuracy"))
    result = DiagnosticResult(cell=cell, figures=figures, seconds=1.0)
    page = evaluations_html([Evaluated(CommitWeights(step=4, attempt=1, weights=weights), (result,))], [])
    assert "128 tokens" in page
