"""Ranking: every row is read once an epoch, and equal texts of a batch are no negatives of each other."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from encoder_core.objectives.info_nce import Contrast, info_nce
from launcher.after.embed import ranking
from launcher.after.embed.model import load_model
from launcher.after.embed.rows import TextColumns
from launcher.after.embed.settings import EmbedTraining
from launcher.after.embed.train import make_loss, train_on_rows
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from tests.support.models.exports import FAMILIES, export


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp("ranking") / "bert"
    export(FAMILIES["bert"], folder)
    with open_pretrained(str(folder)) as pretrained:
        return pretrained  # a local folder: it stays


def training(**loss: Any) -> EmbedTraining:
    kind = {"kind": "multiple_negatives", "scale": 3.0, **loss}
    return EmbedTraining.model_validate({"train": {"files": ["x.jsonl"], "texts": ["a", "p"]}, "loss": kind})


def drawn(draws: random.Random, rows: int, texts: int, different: int) -> TextColumns:
    words = [f"{draws.choice('abcdefgh')} {number}" for number in range(different)]
    columns = {str(place): draws.choices(words, k=rows) for place in range(texts)}
    return TextColumns(columns, None)


@pytest.mark.parametrize("mini_batch", [None, 8])
def test_every_row_is_read_once_an_epoch(
    bert: LocalModel, monkeypatch: pytest.MonkeyPatch, mini_batch: int | None
) -> None:
    """Of 400 rows with 26 different positives, a batch of 16 with each text at most once takes up a quarter."""
    seen = list[tuple[int, ...]]()

    def watched(*args: Any, texts_NG: torch.Tensor, **rest: Any) -> Contrast:
        seen.extend(tuple(row) for row in texts_NG.tolist())
        return info_nce(*args, texts_NG=texts_NG, **rest)

    monkeypatch.setattr(ranking, "info_nce", watched)
    draws = random.Random(1)
    texts = {
        "a": [f"query {n}" for n in range(400)],
        "p": [draws.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(400)],
    }
    trained = train_on_rows(bert, training(mini_batch=mini_batch), TextColumns(texts, None), None)
    assert (trained.rows, trained.steps, len(seen)) == (400, 25, 400)
    assert len({query for query, _ in seen}) == 400
    assert sorted(Counter(p for _, p in seen).values()) == sorted(Counter(texts["p"]).values())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("mini_batch", [None, 3])
def test_loss_and_gradient_are_the_formulas(
    bert: LocalModel, symmetric: bool, mini_batch: int | None
) -> None:
    settings = training(symmetric=symmetric, mini_batch=mini_batch)
    model = load_model(bert, settings).eval()
    draws = random.Random(f"{symmetric} {mini_batch}")
    for different in (2, 4, 9, 40):
        rows = drawn(draws, 12, 2 + draws.randrange(2), different)
        batch = draws.sample(range(12), 7)
        columns = [[column[row] for row in batch] for column in rows.texts.values()]
        model.zero_grad()
        loss = make_loss(model, settings, rows)(
            [model.preprocess(texts) for texts in columns], torch.tensor(batch)
        )
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        expected = plain_loss([list(row) for row in zip(*columns, strict=True)], model, symmetric)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for name, parameter in model.named_parameters():
            if name in found:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


def plain_loss(rows: list[list[str]], model: Any, symmetric: bool) -> torch.Tensor:
    """InfoNCE at scale 3, written out: of each query, and each positive, with what is no negative left out."""
    vectors = [
        torch.nn.functional.normalize(model(model.preprocess(row))["sentence_embedding"], dim=-1)
        for row in rows
    ]
    losses = []
    for i, (query, positive, *_) in enumerate(rows):
        candidates = [vectors[i][1]]
        for j, row in enumerate(rows):
            candidates += [
                vectors[j][place]
                for place, text in enumerate(row)
                if place > 0
                and (i, 1) != (j, place)
                and text not in (query, positive)
                and not (place == 1 and row[0] == query)
            ]
        ways = [(torch.stack(candidates) @ vectors[i][0] * 3).logsumexp(0)]
        if symmetric:
            queries = [
                vectors[j][0]
                for j, row in enumerate(rows)
                if i == j or (row[0] not in (query, positive) and row[1] != positive)
            ]
            ways.append((torch.stack(queries) @ vectors[i][1] * 3).logsumexp(0))
        losses.append(sum(ways) / len(ways) - vectors[i][0] @ vectors[i][1] * 3)
    return torch.stack(losses).mean()
