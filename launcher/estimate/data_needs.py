"""What the data service must deliver: tokens, processor cores, and requests to object storage.

Rates are those of data_service/README.md, measured on one core of an AMD EPYC.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from data_service.ingest.options import BuildOptions
from data_service.samples.inputs import Lanes, Packed
from launcher.recipe import Recipe

WHOLE_PATH = 0.044e-6  # CPU seconds a token, S3 to microbatches, rows of 512, masked by token
BY_TOKEN = 1 / 114e6  # of that, cutting and masking
SENTENCE = 25  # tokens of a sentence: assumed, for the boundaries that are read with the tokens
BOUNDARY = 8  # bytes of a boundary, at most
SPARE = 2.0  # workers for each that would be busy all the time: ours


@dataclass(frozen=True)
class DataNeeds:
    """Attributes:
    tokens: a second.
    cpu: seconds of one core a million tokens.
    workers: Ray tasks at a time.
    bytes, requests: a second, from the object store.
    """

    tokens: float
    cpu: float
    workers: int
    bytes: float
    requests: float

    @property
    def cores(self) -> float:
        """Busy ones."""
        return self.tokens * self.cpu / 1e6


def data_needs(recipe: Recipe, vocabulary: int, tokens: float) -> DataNeeds:
    """For `tokens` a second."""
    cpu = WHOLE_PATH - BY_TOKEN + 1 / _masked_a_second(recipe)
    size = 2 if vocabulary <= 1 << 16 else 4
    return DataNeeds(
        tokens,
        cpu * 1e6,
        max(1, math.ceil(SPARE * tokens * cpu)),
        tokens * (size + BOUNDARY / SENTENCE),
        tokens / BuildOptions.model_fields["block_tokens"].default,
    )


def _masked_a_second(recipe: Recipe) -> float:
    """Tokens cut and masked by one core."""
    if isinstance(recipe.input, Lanes) or recipe.objective.mlm is None:
        return 15e6
    pairs = not isinstance(recipe.input, Packed)
    match recipe.objective.mlm.unit:
        case "token":
            return 56e6 if pairs else 114e6
        case "whole_word":
            return 29e6 if pairs else 60e6
        case "ngram" | "span":
            return 29e6
        case _ as never:
            assert_never(never)
