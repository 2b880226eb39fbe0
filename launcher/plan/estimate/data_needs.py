"""What the data service must deliver: tokens, processor cores, and requests to object storage.

Rates are those of tests/bench/RESULTS-speed.md, measured on one core of an AMD EPYC.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from data_service.ingest.options import BLOCK_TOKENS
from data_service.samples.lanes import Lanes
from data_service.samples.packing import PackedInput
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.stream.statistics import ShuffleRadius, expected_radius
from launcher.output import human_count
from launcher.runtime.capacity.devices import BYTES_PER_TOKEN
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import tokens_per_step

TOKEN_CPU_S = 0.044e-6  # CPU seconds per token, from S3 to microbatches; rows of 512, masked by token
MASKING_CPU_S = 1 / 114e6  # CPU seconds per token of cutting and masking, a part of `TOKEN_CPU_S`
SENTENCE_TOKENS = 25  # assumed number of tokens in a sentence; a corpus stores the boundaries of sentences
BOUNDARY_BYTES = 8  # largest number of bytes that a stored boundary takes
_ASSUMED_EPOCH_TOKENS = 4e9  # assumed number of tokens in an epoch
_MIN_EPOCH_BATCHES = 64  # least number of batches in the assumed epoch, which the estimate of the shuffle needs
WORKERS_PER_BUSY_WORKER = 2.0  # planned workers per worker that would be busy all the time, as a reserve


@dataclass(frozen=True)
class DataNeeds:
    """The throughput that training needs from the data service.

    Attributes:
        tokens: tokens a second.
        cpu: CPU seconds for a million tokens.
        workers: number of Ray tasks that run at a time.
        bytes, requests: bytes and requests a second to the object store.
    """

    tokens: float
    cpu: float
    workers: int
    bytes: float
    requests: float

    @property
    def busy_cores(self) -> float:
        """Number of cores that are busy all the time."""
        return self.tokens * self.cpu / 1e6


def estimate_data_needs(recipe: Recipe, vocabulary: int, tokens_per_second: float) -> DataNeeds:
    """Return what the data service must provide so that the run trains on `tokens_per_second` tokens a second."""
    cpu = TOKEN_CPU_S - MASKING_CPU_S + 1 / _masked_tokens_per_cpu_s(recipe)
    size = 2 if vocabulary <= 1 << 16 else 4
    return DataNeeds(
        tokens_per_second,
        cpu * 1e6,
        max(1, math.ceil(WORKERS_PER_BUSY_WORKER * tokens_per_second * cpu)),
        tokens_per_second * (size + BOUNDARY_BYTES / SENTENCE_TOKENS),
        tokens_per_second / BLOCK_TOKENS,
    )


def trained_token_lines(tokens: float, text_bytes: float | None) -> Iterator[tuple[str, str, str]]:
    """Yield lines of an estimate as (subject, formula, result): the tokens of the whole run, and how often it reads a
    corpus of `text_bytes` bytes."""
    yield "tokens of the run", "steps x rows x length of its phases", human_count(tokens)
    if text_bytes is not None:
        there = text_bytes / BYTES_PER_TOKEN
        yield (
            "tokens of the text",
            f"{text_bytes / 1e9:,.3g} GB / {BYTES_PER_TOKEN} B (assumed)",
            human_count(there),
        )
        yield "epochs", f"{human_count(tokens)} / {human_count(there)}", f"{tokens / there:.2f}"


def estimate_shuffle_radius(recipe: Recipe) -> ShuffleRadius | None:
    """Return from how many blocks (tokens stored together) of the corpus a batch's rows come, in the phase with most
    tokens a step.

    All sources are assumed to be equally large, and built with the defaults of `corpus build`. None for XLNet's rows
    (`Lanes`), which are not shuffled.
    """
    if isinstance(recipe.input, Lanes):
        return None
    largest = max(recipe.phases, key=tokens_per_step)
    rows = max(1, tokens_per_step(largest) // largest.length)
    each = max(_ASSUMED_EPOCH_TOKENS, _MIN_EPOCH_BATCHES * tokens_per_step(largest)) / len(recipe.corpus.sources)
    return expected_radius(
        [each] * len(recipe.corpus.sources),
        batch=rows,
        length=largest.length,
        is_spread=recipe.shuffle == "spread",
        block_tokens=BLOCK_TOKENS,
    )


def _masked_tokens_per_cpu_s(recipe: Recipe) -> float:
    """Return the measured number of tokens that one core cuts into rows and masks in a second."""
    if isinstance(recipe.input, TextPairs | RepeatedSentences):
        return 300e6  # rows are cut from documents, and nothing is masked
    if isinstance(recipe.input, Lanes):
        return 15e6
    if recipe.objective.denoise is not None:
        return 4e6
    pairs = not isinstance(recipe.input, PackedInput)
    mlm = recipe.objective.mlm
    match "token" if mlm is None else mlm.unit:  # clm masks nothing, and costs at most as much as masking by token
        case "token":
            return 56e6 if pairs else 114e6
        case "whole_word" | "phrase" | "entity":
            return 29e6 if pairs else 60e6
        case "ngram" | "span":
            return 29e6
        case _ as never:
            assert_never(never)
