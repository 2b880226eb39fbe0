"""Rows of tables indexed by one vocabulary, for another: copied where both know a piece, else the mean of its parts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.transfer import origins
from encoder_core.families.build import ModelConfig
from launcher.objective import Objective, meta_module


def vocabulary_tables(config: ModelConfig, objective: Objective) -> set[str]:
    """The parameters with a row for each id: those whose shape follows the vocabulary's size."""
    other = config.model_copy(update={"vocab": config.vocabulary + 1})
    shapes = {name: p.shape for name, p in meta_module(other, objective).named_parameters()}
    return {name for name, p in meta_module(config, objective).named_parameters() if p.shape != shapes[name]}


class CarryOver:
    """From tables of `old`'s ids to tables of `new`'s. Raises TokenizerError as `origins`.

    Rows beyond both tokenizers' ids, which fill a vocabulary up to a round number, stay as they are.

    Attributes:
        copied, averaged: how many of the new ids have the row of the same piece, and the mean of their parts' rows.
    """

    def __init__(self, old: Tokenizer, new: Tokenizer) -> None:
        found = origins(old, new)
        self.copied, self.averaged = found.copied, found.averaged
        self._ids, self._offsets = torch.from_numpy(found.ids), torch.from_numpy(found.offsets)
        self._used = max(old.vocab_size, new.vocab_size)

    def __call__(self, table: Tensor, fresh: Tensor) -> Tensor:
        """The new table, [new ids, ...], from the old [old ids, ...]; `fresh` fills rows that nothing is known of."""
        count = len(self._offsets) - 1
        flat = table.reshape(len(table), -1)
        means = F.embedding_bag(self._ids, flat, self._offsets[:-1], mode="mean")
        result = fresh.clone()
        idle = slice(self._used, min(len(table), len(fresh)))
        result[idle] = table[idle]
        known = self._offsets.diff() > 0
        result[:count][known] = means[known].reshape(-1, *table.shape[1:])
        return result
