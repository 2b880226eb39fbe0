"""Masked diffusion: predicts the original ids of masked tokens; a row's loss is divided by the row's masking rate."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from encoder_core.errors import TrainingError
from encoder_core.objectives.mlm import TokenPrediction
from encoder_core.objectives.term import HeadTerm, Refusal, SharedParts, TermSetting, TermSums

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from jaxtyping import Float
    from torch import Tensor

    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class DiffusionConfig(TokenPrediction):
    """Masked diffusion. The data service draws masking rates and masks. The term trains the masked-language-model head,
    with which the model is exported.
    """

    name = "diffusion"

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse what mlm refuses, and other terms, which need a fixed masking rate."""
        found = list(super().refusals(setting))
        others = [name for name in setting.terms if name != self.name]
        if others and not found:
            found.append(
                Refusal(
                    ("objective",),
                    f"diffusion cannot be combined with {others[0]}: it masks any share of a row, from none to all",
                    "leave one of the two out",
                )
            )
        yield from found

    def build(self, shared: SharedParts) -> "DiffusedTokens":
        return DiffusedTokens(self, shared)


class DiffusedTokens(HeadTerm):
    """Cross-entropy of the original ids at masked tokens, divided by the row's masking rate (Sahoo et al. 2024, section
    3, in continuous time; Nie et al. 2025, section 2.1).

    All tokens that could be masked count as targets, as in LLaDA's code, so the mean loss is in nats per token of text.
    Over random rates and masks it is an unbiased estimate of an upper bound of the text's negative log-likelihood.
    Metrics: "bits", the loss in bits; "hidden", the number of masked tokens; "filled", the number of those whose most
    likely id is the original one.
    """

    def __init__(self, config: DiffusionConfig, shared: SharedParts) -> None:
        self.head = shared.head()
        super().__init__(config, {"head": self.head})

    def target_count(self, batch: "Batch") -> int:
        counts = batch.on_host.maskable
        return 0 if counts is None else int(counts.sum())

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        import torch

        hidden_MH = states.target_states
        at_M = torch.arange(len(hidden_MH), device=hidden_MH.device)
        found = self.head(hidden_MH, at_M, batch.target_ids, weights_M=_target_weights(batch))
        metrics = {
            "bits": found.loss_sum.detach() / math.log(2),
            "filled": found.correct,
            "hidden": torch.full_like(found.correct, len(at_M)),
        }
        return TermSums(found.loss_sum, self.target_count(batch), metrics)


def _target_weights(batch: "Batch") -> 'Float[Tensor, " targets"]':
    """Return 1 / rate of each target's row. Raises TrainingError: the batch has targets, but no rates."""
    import torch

    if batch.rates is None:
        if batch.target_positions.numel():
            raise TrainingError(
                "a batch without masking rates (one for each row) cannot train masked diffusion",
                remedy="set objective.diffusion in the recipe, so that the data service draws rates",
            )
        return torch.zeros(0, device=batch.tokens.device)
    row_M = torch.searchsorted(batch.cu_seqlens, batch.target_positions.to(torch.int32), right=True) - 1
    return batch.rates.double().reciprocal().index_select(0, row_M)
