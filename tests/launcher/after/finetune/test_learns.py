"""From a run's checkpoint to a model that does its task: every family, every kind, above what a guess reaches."""

import json
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.tokenizers.load import save_tokenizer
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.tasks.examples import Questions, Sentences, Tagged
from launcher.after.tasks.metrics import score
from launcher.after.tasks.task import Task
from launcher.app.cli.recipe import load_recipe
from launcher.runtime.run.create import create_run
from launcher.runtime.run.inputs import sections_for
from launcher.runtime.run.record import open_run
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, fitting_tokenizer
from tests.support.runs.starts import Setting, trained
from tests.support.tasks.reloaded import predictions
from tests.support.tasks.small_tasks import task

pytestmark = pytest.mark.long
KINDS = ("classification", "pair_classification", "regression", "tagging", "span")
RECIPES = {
    "bert": "bert-base",
    "roberta": "roberta-base",
    "albert": "albert-base",
    "spanbert": "spanbert-base",
    "xlnet": "xlnet-base",
    "electra": "electra-base",
    "deberta": "deberta-base",
    "deberta-v2": "deberta-v2-xlarge",
    "deberta-v3": "deberta-v3-base",
}
SHAPE = ("model.max_length=96", "model.hidden=64", "model.feed_forward=128", "model.heads=4")
STEPS = FinetuneSettings(lr=2e-3, epochs=10, batch=16, dropout=0.0, task_dropout=0.0)


def guess(asked: Task) -> float:
    """The main metric of the best answer that knows nothing of the example."""
    examples = asked.read("dev")
    match examples:
        case Sentences() if asked.labels:
            return Counter(examples.labels.tolist()).most_common(1)[0][1] / len(examples)
        case Sentences():
            return 0.3  # of a correlation, which a constant does not have
        case Tagged():
            everywhere = tuple(tuple(1 for _ in words) for words in examples.words)
            return score(asked, examples, everywhere)["entity_f1"]
        case Questions():
            whole = dict(zip(examples.ids, examples.contexts, strict=True))
            none = dict.fromkeys(examples.ids, "")
            return max(score(asked, examples, given)["answer_f1"] for given in (whole, none))
    raise AssertionError(asked.kind)


def run_of(family: str, folder: Path) -> str:
    """A run of the family's bundled recipe, made tiny, with a checkpoint; its tokenizer is of the family's kind."""
    tokenizer = fitting_tokenizer(FAMILIES[family].kind, FAMILIES[family].style)
    draw = random.Random(3)
    sentences = [" ".join(draw.choices(WORDS, k=6)) + "." for _ in range(240)]
    texts = ("\n".join(sentences[start : start + 4]) for start in range(0, 240, 4))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    save_tokenizer(tokenizer, str(folder / "tokenizer"))
    options = BuildOptions(heldout_fraction=0.1, block_tokens=256)
    text, corpus = str(folder / "text.jsonl"), f"{folder}/corpus"
    build_corpus([text], corpus, f"{folder}/tokenizer", options, lambda progress: None)
    sections = sections_for([corpus], f"{folder}/tokenizer")
    recipe = load_recipe(RECIPES[family], list(SHAPE), tiny=True, sections=sections)
    create_run(recipe, f"{folder}/run", datetime.now(UTC))
    run = open_run(f"{folder}/run")
    trained(Setting(run, tokenizer), run.uri, run.recipe.model, run.recipe.objective)
    return run.uri


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", RECIPES)
def test_a_runs_checkpoint_learns_the_task(tmp_path: Path, family: str, kind: str) -> None:
    run = run_of(family, tmp_path)
    asked = task(kind, tmp_path, train=256, dev=80)
    with open_pretrained(run) as pretrained:
        assert pretrained.step == 4
        outcome = finetune(pretrained, asked, STEPS, 1, str(tmp_path / "out"))
    main = next(iter(outcome.metrics.values()))
    print(f"{family}, {kind}: {main:.3f} against {guess(asked):.3f}")
    assert main > guess(asked) + 0.1
    found = predictions(tmp_path / "out", kind, asked.read("dev"), outcome.threshold)
    if kind == "regression":
        np.testing.assert_allclose(found, outcome.predictions, atol=1e-4)  # type: ignore[arg-type]
    elif isinstance(found, np.ndarray):
        np.testing.assert_array_equal(found, outcome.predictions)
    else:
        assert found == outcome.predictions
