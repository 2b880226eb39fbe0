"""`maskfleet finetune` against a script with transformers' Trainer alone, as its users write it: the same figures
within the noise of seeds."""

import statistics
from pathlib import Path

import datasets
import numpy as np
import pytest
import transformers
from scipy.stats import spearmanr

from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.tasks.examples import Sentences
from launcher.after.tasks.task import Task
from tests.support.tasks.small_tasks import model, task

pytestmark = pytest.mark.long
SETTINGS = FinetuneSettings(lr=2e-3, epochs=6, batch=16, keep="last")


def by_the_trainer_alone(pretrained: LocalModel, asked: Task, seed: int, folder: Path) -> float:
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        pretrained.folder, num_labels=len(asked.labels) or 1
    )

    def rows(split: str) -> datasets.Dataset:
        examples = asked.read(split)
        assert isinstance(examples, Sentences)
        pairs = () if examples.second is None else (list(examples.second),)
        kind = np.int64 if asked.labels else np.float32
        encoded = tokenizer(list(examples.first), *pairs, truncation=True)
        return datasets.Dataset.from_dict({**encoded, "labels": examples.labels.astype(kind)})

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, num_train_epochs=6, learning_rate=2e-3,
        warmup_steps=0.1, weight_decay=0.01, adam_epsilon=1e-6, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=seed,
    )  # fmt: skip
    trainer = transformers.Trainer(
        network, arguments, transformers.DataCollatorWithPadding(tokenizer), rows("train")
    )
    trainer.train()
    found = trainer.predict(rows("dev"))
    if asked.labels:
        return float((found.predictions.argmax(-1) == found.label_ids).mean())
    return float(spearmanr(found.predictions[:, 0], found.label_ids).statistic)


@pytest.mark.parametrize(("kind", "metric"), [("classification", "accuracy"), ("regression", "spearman")])
def test_five_seeds_agree_within_their_noise(kind: str, metric: str, tmp_path: Path) -> None:
    pretrained, asked = model("bert", tmp_path / "model"), task(kind, tmp_path, train=160, dev=200)
    ours = [finetune(pretrained, asked, SETTINGS, seed).metrics[metric] for seed in range(5)]
    theirs = [by_the_trainer_alone(pretrained, asked, seed, tmp_path / "trainer") for seed in range(5)]
    print(f"{kind}: ours {ours}; the Trainer {theirs}")
    noise = ((statistics.variance(ours) + statistics.variance(theirs)) / 5) ** 0.5
    assert abs(statistics.mean(ours) - statistics.mean(theirs)) <= 3 * noise + 0.005
