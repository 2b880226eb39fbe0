"""Runs of masked diffusion: held-out rates and masks are the same every time, and the export is a masked language model
that transformers loads and `fill` writes with."""

import math
from pathlib import Path

import pytest
import torch

from launcher.after.diagnose.measures import measure_heldout_loss
from launcher.after.diagnose.states import open_checkpoint
from launcher.after.export.export import export_run
from launcher.after.fill.fill import MaskFiller
from launcher.runtime.run.record import open_run
from launcher.runtime.run.streams import heldout_spec, stream_spec
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SETTINGS = (
    "phases=[{steps: 6, length: 32, batch: {sequences: 12}}]",
    "evaluation={every: {steps: 3}, samples: 12}",
    "objective={diffusion: {}}",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("diffusion")
    small_runs.prepare_corpus(folder)
    return finish(small_runs.new_run(folder, "run", *SETTINGS), 1)


def test_the_bound_is_on_record_in_bits(run: str) -> None:
    history = small_runs.history(run)
    assert len(history.evaluations) == 3
    for record in (*history.steps[:], *history.evaluations):
        assert record["diffusion_bits"] == pytest.approx(record["diffusion_loss"] / math.log(2))
        assert 0 <= record["diffusion_hidden_accuracy"] <= 1
    guessing = math.log2(open_run(run).tokenizer().vocab_size)
    assert history.evaluations[0]["diffusion_bits"] == pytest.approx(guessing, rel=0.35)


def test_held_out_rows_have_the_same_rates_and_masks_every_time(run: str) -> None:
    """Measured again, the last checkpoint has the very bound that is on record."""
    opened = open_run(run)
    first, again = (heldout_spec(opened, opened.tokenizer()) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.masking.kind == stream_spec(opened, opened.tokenizer(), 0).masking.kind == "diffusion"
    (measured,) = (
        figure.value
        for figure in measure_heldout_loss(open_checkpoint(opened), 12)
        if figure.measure == "diffusion_bits" and figure.length == first.length
    )
    assert measured == pytest.approx(small_runs.history(run).evaluations[-1]["diffusion_bits"], rel=1e-5)


def test_its_export_is_a_masked_language_model(run: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    export_run(open_run(run), None, str(tmp_path))
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model.eval()(**tokenizer("the loss<mask>", return_tensors="pt")).logits[0]
    best = logits[-2].softmax(-1).max()
    (guess,) = MaskFiller(tmp_path).top_candidates("the loss <mask>", 1)
    assert guess.probability == pytest.approx(float(best), rel=1e-4)
    assert MaskFiller(tmp_path).fill("<mask:6>", steps=3)
