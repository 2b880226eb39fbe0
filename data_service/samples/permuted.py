"""Permuted language modelling: which tokens are predicted, and in what order (Yang et al. 2019)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class PermutedPrediction(BaseModel):
    """Targets and factorisation order of a row (zihangdai/xlnet, data_utils.py).

    Attributes:
        predict: targets of a row, half of them (rounded up) in its first part.
        context, chosen: an n-gram is predicted out of n * context / chosen tokens (alpha 6, beta 1).
        longest: longest n-gram; n is drawn with probability proportional to 1 / n.
        unit: what an n-gram counts: whole words (the paper), or pieces from a word's start on (the official code).
        permutation: tokens that are permuted together.
        copies: "dynamic" draws anew every epoch; a number k draws k times, used in turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["plm"] = "plm"
    predict: PositiveInt = 85
    context: PositiveInt = 6
    chosen: PositiveInt = 1
    longest: PositiveInt = 5
    unit: Literal["whole_word", "piece"] = "whole_word"
    permutation: PositiveInt = 256
    copies: Literal["dynamic"] | PositiveInt = Field(default="dynamic")

    def mask_epoch(self, epoch: int) -> int:
        """The epoch whose draws are used in `epoch`."""
        return epoch if self.copies == "dynamic" else epoch % self.copies
