"""Text vectors against sentence-transformers: the loss and its gradient, and what an exported folder gives."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss
from torch import nn

from checkpoints.hf.export import write_model
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.modules.text_vectors import ContrastiveModel
from launcher.after.export.sentence_transformer import write_sentence_transformer
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, fitting_tokenizer
from tests.support.models.small_networks import first_pass

EXAMPLES, MICROBATCH, TEXTS = 10, 3, 3
EXACT = {"dropout": 0.0, "attention_dropout": 0.0}
NAMES = ("bert", "roberta", "albert", "electra", "deberta", "deberta-v2", "xlnet")


def model_of(name: str, objective: ContrastiveConfig) -> tuple[ContrastiveModel, ModelConfig, Tokenizer]:
    family = FAMILIES[name]
    tokenizer = fitting_tokenizer(family.kind, family.style)
    config = family.config.model_copy(update=EXACT)
    config = config.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    torch.manual_seed(0)
    model = objective.build(config)
    initialise(model, 0.1, "normal")
    return model, config, tokenizer


def exported(name: str, objective: ContrastiveConfig, folder: Path) -> tuple[ContrastiveModel, Any, Tokenizer]:
    """Our model, theirs with the same weights, and the tokenizer."""
    model, config, tokenizer = model_of(name, objective)
    read = {key: parameter.detach() for key, parameter in model.named_parameters()}.__getitem__
    write_model(folder, read, config, tokenizer.save_files(), "none")
    write_sentence_transformer(
        folder, pooling=objective.pooling, normalize=objective.normalize, max_length=config.max_length
    )
    return model, SentenceTransformer(str(folder), device="cpu"), tokenizer


def examples() -> list[list[str]]:
    draw = random.Random(4)
    return [[" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(TEXTS)] for _ in range(EXAMPLES)]


def to_batch(tokenizer: Tokenizer, texts: Sequence[Sequence[str]], *, cls_last: bool) -> Batch:
    """As the data service lays texts out."""
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    inner = [tokenizer.encode(text).tolist() for example in texts for text in example]
    rows = [torch.tensor([*ids, sep, cls] if cls_last else [cls, *ids, sep]) for ids in inner]
    lengths = torch.tensor([len(row) for row in rows])
    ends = lengths.cumsum(0)
    segments = torch.zeros(int(ends[-1]), dtype=torch.int64)
    segments[ends - 1] = 2
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        tokens=torch.cat(rows),
        cu_seqlens=torch.cat([none.new_zeros(1), ends]).int(),
        max_length=int(lengths.max()),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        target_positions=none,
        target_ids=none,
        segments=segments if cls_last else None,
        group=len(texts[0]),
    )


def gradient_of_ours(model: ContrastiveModel, batches: Sequence[Batch]) -> tuple[float, dict[str, np.ndarray]]:
    """As a step does it: vectors without a graph, then each microbatch with what these make of it."""
    total = 0.0
    for batch, memory in zip(batches, first_pass(model, batches), strict=True):
        loss = sum(term.loss_sum for term in model(batch, memory).terms) / EXAMPLES
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def gradients(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "theirs"),
    [
        (ContrastiveConfig(), {}),
        (ContrastiveConfig(pooling="cls", temperature=0.2), {}),
        (
            ContrastiveConfig(bidirectional=True, matryoshka=(32, 8)),
            {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
        ),
    ],
    ids=["plain", "cls", "both directions, narrower too"],
)
def test_the_cached_loss_and_its_gradient_are_theirs(
    objective: ContrastiveConfig, theirs: dict[str, Any], tmp_path: Path
) -> None:
    """CachedMultipleNegativesRankingLoss in fp32, with hard negatives, in microbatches of 3 and the last of 1."""
    model, other, tokenizer = exported("bert", objective, tmp_path)
    texts = examples()
    loss: Any = CachedMultipleNegativesRankingLoss(other, scale=1 / objective.temperature, mini_batch_size=4, **theirs)
    if objective.matryoshka is not None:
        loss = MatryoshkaLoss(other, loss, list(objective.matryoshka))
    other.train()
    value = loss([other.preprocess(list(column)) for column in zip(*texts, strict=True)], None)
    value.backward()
    batches = [
        to_batch(tokenizer, texts[first : first + MICROBATCH], cls_last=False)
        for first in range(0, EXAMPLES, MICROBATCH)
    ]
    total, ours = gradient_of_ours(model.train(), batches)
    assert abs(total - value.item()) < 1e-5 * value.item()
    names = hf_format_of(FAMILIES["bert"].config, "none").table.their_names(FAMILIES["bert"].config.layers)
    found = gradients(other[0].auto_model)
    expected = np.concatenate([found[names[name].removeprefix("bert.")].ravel() for name in ours])
    flat = np.concatenate([values.ravel() for values in ours.values()])
    assert np.linalg.norm(flat - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_folder_gives_the_vectors_that_were_trained(name: str, pooling: Any, tmp_path: Path) -> None:
    objective = ContrastiveConfig(pooling=pooling)
    model, other, tokenizer = exported(name, objective, tmp_path)
    texts = examples()
    batch = to_batch(tokenizer, texts, cls_last=isinstance(FAMILIES[name].config, XlnetConfig))
    with torch.no_grad():
        vectors = nn.functional.normalize(model.eval().embed(batch), dim=-1).flatten(0, 1)
    found = other.encode([text for example in texts for text in example])
    np.testing.assert_allclose(found, vectors.numpy(), rtol=0, atol=2e-6)
