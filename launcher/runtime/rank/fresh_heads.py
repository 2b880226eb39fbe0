"""Initial values for a fresh language-model head that decodes with word embeddings from another model.

The head's decoder is tied to the word embeddings of the model that the run starts from. Nothing in that model's
training kept these rows short; those of a distilled model were never used by a decoder. With the usual initial values,
logits behind the fresh LayerNorm spread as far as the rows are long, and the loss is too high by half the square of
that spread: 15.8 nats at the first step where word frequencies alone give 6.2, and still 14.2 after ten steps of a slow
warmup (figures in `tests/bench/RESULTS-runs.md`).

So the head begins by predicting word frequencies. Its bias is the logarithm of the corpora's unigram frequencies, and
the gain of its last LayerNorm is set so that logits spread by half a nat around them, whatever the scale of the
embeddings.
"""

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from encoder_core.heads.prediction import MaskedLanguageModelHead, SpanBoundaryHead
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.inputs import unigram_probabilities

SPREAD = 0.5  # standard deviation of a position's logits over the vocabulary


def initial_head(
    model: nn.Module, recipe: Recipe, fresh: Collection[str], value: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Values, by name, for the gain and the bias of each head of `model` that is `fresh` while its table is not.

    `value` gives a parameter's initial value by name, whole. Raises CorpusError, StoreError: a corpus cannot be read.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for prefix, norm, head in _heads(model):
        gain, bias, table = (
            f"{prefix}.{norm}.weight",
            f"{prefix}.decoder.bias",
            names[id(head.decoder.weight)],
        )
        if gain in fresh and bias in fresh and table not in fresh:
            words = value(table).float()
            found[gain] = torch.full_like(value(gain), min(1.0, SPREAD / _spread(words)))
            found[bias] = _log_frequencies(recipe, len(words))
    return found


def _heads(model: nn.Module) -> Iterator[tuple[str, str, MaskedLanguageModelHead | SpanBoundaryHead]]:
    """Name, the name of the last LayerNorm in it, module; of those that have one."""
    for prefix, module in model.named_modules():
        if isinstance(module, MaskedLanguageModelHead) and module.norm is not None:
            yield prefix, "norm", module
        elif isinstance(module, SpanBoundaryHead):
            yield prefix, "second_norm", module


def _spread(table: Tensor) -> float:
    """Of the logits of a vector with independent components of variance 1, over the rows of `table` [V, E]."""
    return max(1e-6, math.sqrt(float((table - table.mean(0)).square().sum(1).mean())))


def _log_frequencies(recipe: Recipe, rows: int) -> Tensor:
    """[rows] float32; rows beyond the tokenizer's ids are as rare as one that does not occur."""
    frequencies = torch.from_numpy(unigram_probabilities(recipe))
    result = torch.full((rows,), math.log(float(frequencies.min())))
    result[: len(frequencies)] = frequencies.log().float()
    return result
