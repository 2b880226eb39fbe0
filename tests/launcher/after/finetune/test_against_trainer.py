"""Our loop against transformers' Trainer, on the same exported weights.

With the same head, order and settings and without dropout both do the same arithmetic, so that losses and weights are
equal to rounding. With dropout, and each with draws of its own, they agree within the noise of seeds.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from launcher.after.finetune.inputs import IGNORED, InputRow, Pieces, TaskKind, open_pieces
from launcher.after.finetune.loop import compute_logits, epoch_order, reproducible, train_updates
from launcher.after.finetune.measure import Learnable, kind_of, measure, prepare
from launcher.after.finetune.network import HeadSpec, TaskNetwork, open_config, open_network
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.tasks.task import Task
from tests.support.tasks.small_tasks import QUICK, model, task

pytestmark = pytest.mark.long
SEED = 11
CPU = torch.device("cpu")


class Ordered(torch.utils.data.Sampler[int]):
    """Our order of each epoch, for a dataset that is gone through again and again."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        yield from epoch_order(self.rows, SEED, self.epoch).tolist()
        self.epoch += 1


class Observed(transformers.Trainer):
    """A Trainer that keeps the loss of each update; `ours`: it goes through the rows in our order."""

    def __init__(self, *, ours: bool, **given: Any) -> None:
        super().__init__(**given)
        self.losses: list[float] = []
        self.ours = ours

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Ordered(len(self.train_dataset)) if self.ours else super()._get_train_sampler(train_dataset)

    def compute_loss(self, *args: Any, **given: Any) -> Any:
        loss = super().compute_loss(*args, **given)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
        return loss


def collate(rows: Sequence[InputRow], tokenizer: Any, head: str) -> dict[str, torch.Tensor]:
    """A batch by transformers' own padding."""
    items = []
    for row in rows:
        types = {} if row.types is None else {"token_type_ids": row.types.tolist()}
        items.append({"input_ids": row.ids.tolist(), **types})
    batch = dict(tokenizer.pad(items, return_tensors="pt"))
    width = batch["input_ids"].shape[1]
    shifts = [width - len(row) if tokenizer.padding_side == "left" else 0 for row in rows]
    if head == "TokenClassification":
        batch["labels"] = torch.full((len(rows), width), IGNORED)
        for index, (row, shift) in enumerate(zip(rows, shifts, strict=True)):
            batch["labels"][index, shift : shift + len(row)] = torch.from_numpy(row.target)
    elif head == "QuestionAnswering":
        for name, column in (("start_positions", 0), ("end_positions", 1)):
            batch[name] = torch.tensor(
                [row.target[column] + shift for row, shift in zip(rows, shifts, strict=True)]
            )
    else:
        labels = np.array([row.target for row in rows])
        batch["labels"] = torch.from_numpy(labels.astype(np.float32) if labels.dtype == float else labels)
    return batch


def opened(
    pretrained: LocalModel, asked: Task, settings: FinetuneSettings, seed: int
) -> tuple[TaskNetwork, Learnable, Pieces]:
    config = open_config(pretrained.folder)
    pieces = open_pieces(pretrained.folder, config, settings.max_length)
    kind = kind_of(asked, pieces, settings)
    wanted = HeadSpec(kind.head, kind.outputs, tuple(asked.labels))
    return open_network(pretrained.folder, config, wanted, settings, seed), kind, pieces


def trained_by_trainer(
    network: TaskNetwork,
    kind: TaskKind,
    rows: list[InputRow],
    settings: FinetuneSettings,
    folder: Path,
    *,
    tokenizer: Any,
    seed: int,
    ours: bool,
) -> list[float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch,
        num_train_epochs=settings.epochs,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_betas[0],
        adam_beta2=settings.adam_betas[1],
        adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.clip,
        lr_scheduler_type="linear",
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    trainer = Observed(
        ours=ours,
        model=network.model,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda part: collate(part, tokenizer, kind.head),
    )
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize("kind_name", ["classification", "regression", "tagging", "span"])
@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "xlnet", "electra", "deberta", "deberta-v3"])
def test_without_dropout_losses_and_weights_are_the_trainers(
    family: str, kind_name: str, tmp_path: Path
) -> None:
    pretrained, asked = model(family, tmp_path / "model"), task(kind_name, tmp_path, train=44)
    network, kind, pieces = opened(pretrained, asked, QUICK, SEED)
    rows = prepare(kind, asked.read("train")).prepared.rows
    with reproducible(CPU, 1):
        ours = list(train_updates(network, kind, pieces, rows, settings=QUICK, seed=SEED))
        theirs_network, _, _ = opened(pretrained, asked, QUICK, SEED)
        theirs = trained_by_trainer(
            theirs_network,
            kind,
            rows,
            QUICK,
            tmp_path / "trainer",
            tokenizer=pieces.tokenizer,
            seed=SEED,
            ours=True,
        )
    assert len(ours) == len(theirs) == 2 * 6
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    np.testing.assert_allclose(ours[:3], theirs[:3], rtol=1e-5)
    start, _, _ = opened(pretrained, asked, QUICK, SEED)
    moved = sum(
        float((a - b).norm() ** 2) for a, b in zip(network.parameters(), start.parameters(), strict=True)
    )
    apart = sum(
        float((a - b).norm() ** 2)
        for a, b in zip(network.parameters(), theirs_network.parameters(), strict=True)
    )
    assert moved > 0
    assert (apart / moved) ** 0.5 < 0.02


def test_with_dropout_five_seeds_agree_within_their_noise(tmp_path: Path) -> None:
    """Accuracy on dev, each side with heads, order and dropout of its own."""
    pretrained, asked = (
        model("bert", tmp_path / "model"),
        task("classification", tmp_path, train=96, dev=200),
    )
    settings = FinetuneSettings(lr=2e-3, epochs=8, batch=16, keep="last")
    ours, theirs = [], []
    for seed in range(5):
        ours.append(next(iter(finetune(pretrained, asked, settings, seed).metrics.values())))
        network, kind, pieces = opened(pretrained, asked, settings, 100 + seed)
        rows = prepare(kind, asked.read("train")).prepared.rows
        with reproducible(CPU, 1):
            trained_by_trainer(
                network,
                kind,
                rows,
                settings,
                tmp_path / "trainer",
                tokenizer=pieces.tokenizer,
                seed=seed,
                ours=False,
            )
            dev = prepare(kind, asked.read("dev"))
            logits = compute_logits(network, pieces, dev.prepared.rows)
        theirs.append(measure(kind, asked, dev, logits, max_answer=30).main)
    spread = (statistics.stdev(ours), statistics.stdev(theirs))
    means = (statistics.mean(ours), statistics.mean(theirs))
    print(
        f"ours {means[0]:.4f} +- {spread[0]:.4f}: {ours}; the Trainer {means[1]:.4f} +- {spread[1]:.4f}: {theirs}"
    )
    noise = ((spread[0] ** 2 + spread[1] ** 2) / 5) ** 0.5
    assert abs(means[0] - means[1]) <= 3 * noise + 0.005  # a single example of dev
    assert min(means) > 0.7
