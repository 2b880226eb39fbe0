"""Fill a masked sentence with an exported model, by our own code."""

from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.hf.load import load_pretrained
from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.objectives.mlm import masked_language_model

MASK = "<mask>"


@dataclass(frozen=True)
class Guess:
    """A candidate for the mask, and its probability among all ids."""

    text: str
    probability: float


def fill_mask(folder: Path, sentence: str, count: int) -> list[Guess]:
    """The `count` likeliest tokens for the one `<mask>` in `sentence`, by the exported model in `folder`.

    Raises:
        TokenizerError: the sentence does not have exactly one mask. ModelError: no model there.
    """
    tokenizer = load_tokenizer(str(folder))
    pretrained = load_pretrained(folder)
    model = masked_language_model(pretrained.config)
    model.load_state_dict(pretrained.tensors | _tied(pretrained.tensors, model), strict=True)
    model.eval()
    with torch.no_grad():
        (logits,) = model.logits(_batch(tokenizer, sentence))
    best = torch.topk(logits.softmax(-1), count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Guess(tokenizer.decode([token]), probability) for token, probability in pairs]


def _tied(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """State-dict names of parameters that share their tensor with one that is stored."""
    stored = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: stored[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: tensors[first] for name, first in names.items() if name not in tensors}


def _batch(tokenizer: Tokenizer, sentence: str) -> Batch:
    before, mask, after = sentence.partition(MASK)
    if not mask or MASK in after:
        raise TokenizerError(f"{sentence!r} does not have exactly one {MASK}", remedy=f"write {MASK} once")
    special = tokenizer.special
    left = [int(token) for token in tokenizer.encode(before.rstrip(" "))]  # the space is the masked word's
    right = [int(token) for token in tokenizer.encode(after)]
    ids = torch.tensor([special.cls, *left, special.mask, *right, special.sep])
    return Batch(
        tokens=ids,
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        max_length=len(ids),
        positions=torch.arange(len(ids)),
        target_positions=torch.tensor([1 + len(left)]),
        target_ids=torch.tensor([special.mask]),
    )
