"""Embedding training: every loss learns, the result is a function of the seed, and a killed one goes on to it."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from encoder_core.errors import ModelError
from launcher.after.embed.settings import EmbedTraining
from launcher.after.embed.train import train_embeddings
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from tests.support.models.exports import FAMILIES, export
from tests.support.tasks.small_tasks import scored, triplets, write_rows

PAIRS = {"texts": ["a", "b"], "label": "score", "scores": [0, 5]}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": (
        {"kind": "softmax"},
        {"texts": ["a", "b"], "label": "relation", "classes": ["same", "other"]},
    ),
    "cosine": ({"kind": "cosine"}, PAIRS),
    "triplet": ({"kind": "triplet", "margin": 1.0}, {"texts": ["a", "p", "n"]}),
    "multiple_negatives": ({"kind": "multiple_negatives", "symmetric": True}, {"texts": ["a", "p"]}),
    "with_negatives": ({"kind": "multiple_negatives"}, {"texts": ["a", "p", "n"]}),
    "cached": ({"kind": "multiple_negatives", "mini_batch": 4}, {"texts": ["a", "p", "n"]}),
    "cosent": ({"kind": "cosent"}, PAIRS),
    "angle": ({"kind": "angle"}, PAIRS),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embed")
    export(FAMILIES["bert"], root / "bert")
    write_rows(root / "pairs.jsonl", scored(96))
    write_rows(root / "triplets.jsonl", triplets(96))
    write_rows(root / "dev.jsonl", scored(80, seed=9))
    return root


@pytest.fixture(scope="module")
def bert(place: Path) -> LocalModel:
    with open_pretrained(str(place / "bert")) as pretrained:
        return pretrained  # a local folder: it stays


def settings(place: Path, loss: str = "cosent", **changes: Any) -> EmbedTraining:
    kind, table = LOSSES[loss]
    file = "triplets.jsonl" if "p" in table["texts"] else "pairs.jsonl"
    values: dict[str, Any] = {
        "train": {"files": [str(place / file)], **table},
        "dev": {"files": [str(place / "dev.jsonl")], **PAIRS},
        "loss": kind,
        "lr": 2e-3,
        "max_length": 16,
        **changes,
    }
    return EmbedTraining.model_validate(values)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(place: Path, bert: LocalModel, loss: str) -> None:
    """Rank correlation on sentences of its own, from that of a random network to nearly all."""
    before = train_embeddings(bert, settings(place, loss, epochs=1, lr=1e-12)).dev["dev_spearman_cosine"]
    trained = train_embeddings(bert, settings(place, loss, epochs=6, batch=8, lr=5e-3))
    assert trained.steps == 6 * 12
    assert trained.dev["dev_spearman_cosine"] > max(0.7, before + 0.1), trained.history


@pytest.mark.long
@pytest.mark.parametrize("loss", ["cosine", "cached", "cosent"])
def test_matryoshka_trains_the_beginning_of_the_vector(place: Path, bert: LocalModel, loss: str) -> None:
    """Four numbers of 32 rank pairs nearly as all of them do."""
    trained = train_embeddings(bert, settings(place, loss, epochs=6, batch=8, lr=5e-3, matryoshka=[32, 4]))
    rows = scored(80, seed=9)
    first, second = (trained.model.encode([str(row[side]) for row in rows])[:, :4] for side in "ab")
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(first), torch.tensor(second))
    assert spearmanr(cosines, [row["score"] for row in rows]).statistic > 0.7


@pytest.mark.long
def test_xlnet_learns_at_its_last_token(place: Path, tmp_path: Path) -> None:
    export(FAMILIES["xlnet"], tmp_path / "xlnet")
    with open_pretrained(str(tmp_path / "xlnet")) as xlnet:
        changes = {"epochs": 6, "batch": 8, "lr": 5e-3, "pooling": "cls", "normalize": True}
        trained = train_embeddings(xlnet, settings(place, "cosent", **changes))
    assert trained.model[1].pooling_mode == "lasttoken"
    assert trained.dev["dev_spearman_cosine"] > 0.7


@pytest.mark.long
def test_the_seed_decides(place: Path, bert: LocalModel) -> None:
    """Also of the softmax's head, which is drawn before the trainer begins."""
    first, again, other = (
        weights(train_embeddings(bert, settings(place, "softmax", seed=seed, dev=None)).model)
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("loss", "draw"),
    [
        ("softmax", 1),
        pytest.param("cached", 2, marks=pytest.mark.long),
        pytest.param("triplet", 3, marks=pytest.mark.long),
    ],
)
def test_a_killed_training_goes_on_to_the_same_weights(
    place: Path, bert: LocalModel, tmp_path: Path, loss: str, draw: int
) -> None:
    """SIGKILL before a random step, several times: bits as if nothing had been."""
    training = settings(place, loss, epochs=2, every=3)
    undisturbed = weights(train_embeddings(bert, training).model)
    scratch, draws = tmp_path / "scratch", random.Random(draw)
    for _ in range(2):
        killed_at(draws.randint(4, 6), lambda: train_embeddings(bert, training, scratch))
    final = train_embeddings(bert, training, scratch)
    assert final.resumed >= 6
    assert final.steps == 12
    assert all(torch.equal(undisturbed[name], value) for name, value in weights(final.model).items())


@pytest.mark.long
def test_the_best_weights_on_dev_are_kept(place: Path, bert: LocalModel) -> None:
    training = settings(place, "cosent", epochs=4, lr=2e-2)
    best, last = (
        train_embeddings(bert, training.model_copy(update={"keep": keep})) for keep in ("best", "last")
    )
    seen = [
        record["eval_dev_spearman_cosine"] for record in best.history if "eval_dev_spearman_cosine" in record
    ]
    assert len(seen) == 4
    assert best.dev["dev_spearman_cosine"] == pytest.approx(max(seen), abs=1e-6)
    assert last.dev["dev_spearman_cosine"] == pytest.approx(seen[-1], abs=1e-6)


@pytest.mark.long
def test_weights_that_are_no_numbers_are_not_handed_out(place: Path, bert: LocalModel) -> None:
    with pytest.raises(ModelError, match=r"\bstep \d+ .*\bfinite\b"):
        train_embeddings(bert, settings(place, "cosine", lr=1e38, dev=None, warmup=0.0))


@pytest.mark.long
def test_a_scratch_of_another_training_is_begun_anew(
    place: Path, bert: LocalModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    train_embeddings(bert, settings(place, every=3, dev=None), scratch)
    with caplog.at_level("WARNING"):
        again = train_embeddings(bert, settings(place, every=3, dev=None, seed=7), scratch)
    assert again.resumed == 0
    assert " start" in caplog.text


def killed_at(step: int, work: Any) -> None:
    """`work` in a forked process, which kills itself before the given optimizer step."""
    child = os.fork()
    if child == 0:
        count, take = 0, torch.optim.AdamW.step

        def counted(self: Any, *args: Any, **rest: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return take(self, *args, **rest)

        torch.optim.AdamW.step = counted  # type: ignore[method-assign]
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    assert os.WTERMSIG(status) == signal.SIGKILL
