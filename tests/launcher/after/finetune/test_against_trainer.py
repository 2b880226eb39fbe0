"""`maskfleet finetune` against a script with transformers' Trainer alone, as its users write it: with the same first
weights of the head, every weight is the same to the bit afterwards. What is left between two such programs is the draw
of that head."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers
from scipy.stats import spearmanr

from launcher.after.finetune.encode import head_for_task
from launcher.after.finetune.model import open_model, open_tokenizer
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.tasks.examples import Sentences
from launcher.after.tasks.task import Task
from tests.support.tasks.small_tasks import model, task

SETTINGS = FinetuneSettings(lr=2e-3, epochs=2, batch=16, keep="last")


def with_a_head(pretrained: LocalModel, asked: Task, seed: int, folder: Path) -> Path:
    """The model as `finetune` begins with it for this seed, as a folder."""
    transformers.set_seed(seed)
    open_model(pretrained.folder, head_for_task(asked), tuple(asked.labels)).save_pretrained(folder)
    open_tokenizer(pretrained.folder).save_pretrained(folder)
    return folder


def by_the_trainer_alone(folder: Path, asked: Task, seed: int, scratch: Path) -> transformers.Trainer:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def rows(split: str) -> datasets.Dataset:
        examples = asked.read(split)
        assert isinstance(examples, Sentences)
        pairs = () if examples.second is None else (list(examples.second),)
        kind = np.int64 if asked.labels else np.float32
        encoded = tokenizer(list(examples.first), *pairs, truncation=True)
        return datasets.Dataset.from_dict({**encoded, "labels": examples.labels.astype(kind)})

    arguments = transformers.TrainingArguments(
        output_dir=str(scratch), per_device_train_batch_size=16, num_train_epochs=2, learning_rate=2e-3,
        warmup_steps=0.1, weight_decay=0.01, adam_epsilon=1e-6, eval_strategy="epoch", save_strategy="no", report_to=[],
        disable_tqdm=True, seed=seed,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.AutoModelForSequenceClassification.from_pretrained(folder),
        arguments,
        transformers.DataCollatorWithPadding(tokenizer),
        rows("train"),
        rows("dev"),
    )
    trainer.train()
    return trainer


def metric_of(trainer: transformers.Trainer, asked: Task) -> float:
    found = trainer.predict(trainer.eval_dataset)
    if asked.labels:
        return float((found.predictions.argmax(-1) == found.label_ids).mean())
    return float(spearmanr(found.predictions[:, 0], found.label_ids).statistic)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classification"),
        ("deberta-v2", "pair_classification"),
        ("modernbert", "regression"),
    ],
)
def test_the_same_head_ends_in_the_same_weights(family: str, kind: str, tmp_path: Path) -> None:
    seed = len(family) + len(kind)
    pretrained, asked = model(family, tmp_path / "model"), task(kind, tmp_path, train=160, dev=60)
    start = with_a_head(pretrained, asked, seed, tmp_path / "start")
    trainer = by_the_trainer_alone(start, asked, seed, tmp_path / "trainer")
    (tmp_path / "ours").mkdir()
    ours = finetune(pretrained, asked, SETTINGS, seed, tmp_path / "ours")
    written = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").state_dict()
    begun = transformers.AutoModelForSequenceClassification.from_pretrained(start).state_dict()
    theirs = trainer.model.state_dict()
    assert written.keys() == theirs.keys()
    assert [name for name, weight in theirs.items() if not torch.equal(weight, written[name])] == []
    assert any(not torch.equal(weight, begun[name]) for name, weight in theirs.items()), "it was trained"
    metric = "accuracy" if asked.labels else "spearman"
    assert ours.metrics[metric] == pytest.approx(metric_of(trainer, asked), abs=1e-12)
