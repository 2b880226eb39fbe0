"""Embedding training: every loss learns, the result is a function of the seed, and a killed one goes on to it."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import FAMILIES, export
from topics import scored, triplets, write_rows

from launcher.embed.settings import Training
from launcher.embed.train import train_embeddings
from launcher.finetune.pretrained import Pretrained, open_pretrained

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
    for name in ("bert", "xlnet"):
        export(FAMILIES[name], root / name)
    write_rows(root / "pairs.jsonl", scored(160))
    write_rows(root / "triplets.jsonl", triplets(160))
    write_rows(root / "dev.jsonl", scored(80, seed=9))
    return root


@pytest.fixture(scope="module")
def bert(place: Path) -> Pretrained:
    with open_pretrained(str(place / "bert")) as pretrained:
        return pretrained  # a local folder: it stays


def settings(place: Path, loss: str = "cosent", **changes: Any) -> Training:
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
    return Training.model_validate(values)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(place: Path, bert: Pretrained, loss: str) -> None:
    """Rank correlation on sentences of its own, from that of a random network to nearly all."""
    trained = train_embeddings(bert, settings(place, loss, epochs=4, batch=8, lr=5e-3))
    assert trained.steps == 80
    assert trained.dev["dev_spearman_cosine"] > 0.7, trained.history


@pytest.mark.parametrize("loss", ["cosine", "triplet", "cached"])
def test_matryoshka_trains_the_beginning_of_the_vector(place: Path, bert: Pretrained, loss: str) -> None:
    trained = train_embeddings(bert, settings(place, loss, epochs=2, matryoshka=[32, 4]))
    model = trained.model
    same, other = (
        model.encode(["a rank reads its rows", "the rows step", "workers die while lost"])[[0, 0]],
        None,
    )
    near = model.encode(["every step is the same", "nothing falls back"])[:, :4]
    first = model.encode(["a rank reads its rows"])[:, :4]
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(first), torch.tensor(near))
    assert cosines[0] > cosines[1]
    assert same is not None
    assert other is None


def test_xlnet_learns_at_its_last_token(place: Path) -> None:
    with open_pretrained(str(place / "xlnet")) as xlnet:
        trained = train_embeddings(xlnet, settings(place, "cosent", epochs=2, pooling="cls", normalize=True))
    assert trained.model[1].pooling_mode == "lasttoken"
    assert trained.dev["dev_spearman_cosine"] > 0.7


def test_the_seed_decides(place: Path, bert: Pretrained) -> None:
    first, again, other = (
        weights(train_embeddings(bert, settings(place, "softmax", seed=seed, dev=None)).model)
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(("loss", "draw"), [("softmax", 1), ("multiple_negatives", 2), ("triplet", 3)])
def test_a_killed_training_goes_on_to_the_same_weights(
    place: Path, bert: Pretrained, tmp_path: Path, loss: str, draw: int
) -> None:
    """SIGKILL before a random step, several times: bits as if nothing had been."""
    training = settings(place, loss, epochs=3, every=4)
    undisturbed = weights(train_embeddings(bert, training).model)
    scratch, draws, resumed = tmp_path / "scratch", random.Random(draw), []
    for _ in range(2):
        killed_at(draws.randint(5, 14), lambda: train_embeddings(bert, training, scratch))
    final = train_embeddings(bert, training, scratch)
    resumed.append(final.resumed)
    assert final.resumed > 0
    assert final.steps == 30
    assert all(torch.equal(undisturbed[name], value) for name, value in weights(final.model).items())


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
