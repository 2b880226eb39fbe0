"""Next-token prediction on causal rows: each target is predicted from the state of the token before it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import uses_mask_decoder
from encoder_core.objectives.term import (
    HeadConfig,
    HeadTerm,
    Refusal,
    SharedParts,
    TermSetting,
    TermSums,
    family_refusal,
    refuse_decoder_family,
)

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


_COMBINABLE_TERMS = ("clm", "mlm")  # the terms that an objective with clm may have


class ClmConfig(HeadConfig):
    """Next-token prediction with causal attention, by the same head that predicts masked tokens.

    It is trained on causal rows, on which no other term has targets. If an objective has clm and mlm, each phase of a
    run trains one of them ("Should We Still Pretrain Encoders with Masked Language Modeling?", arXiv 2507.00994: CLM,
    then MLM).
    """

    name = "clm"
    exported = "mlm"
    reads = "all"
    causal = True
    predicts_ids = True

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse other terms than mlm, models that cannot hide later tokens, and rows that are not running text."""
        others = [name for name in setting.terms if name not in _COMBINABLE_TERMS]
        if others:
            yield Refusal(
                ("objective",),
                f"clm cannot be combined with {others[0]}: its rows are causal, and {others[0]} needs states that see "
                "the whole row",
                f"remove objective.{others[0]}, and train it in a run that starts from this one",
            )
        yield from refuse_decoder_family(self.name, setting)
        if setting.model.permutes:
            remedy = f"use plm for {setting.model.family}, and clm for another family"
            yield family_refusal("clm", setting, "its two streams see tokens in a random order", remedy)
        if setting.model.has_convolution:
            yield Refusal(
                ("model", "convolution"),
                "the convolution shows each token the next one, which clm predicts",
                "set model.convolution to null, or train mlm",
            )
        if uses_mask_decoder(setting.model):
            yield Refusal(
                ("model", "mask_decoder"),
                "clm hides no token, and DeBERTa's enhanced mask decoder looks again at the places of hidden tokens",
                "set model.mask_decoder to plain, or train mlm",
            )
        if setting.rows is not None and (setting.rows.lanes or setting.rows.texts):
            yield Refusal(
                ("input", "packing"),
                f"clm predicts the next token of running text, and packing {setting.rows.packing} makes other rows",
                "set input.packing to full_sentences",
            )

    def build(self, shared: SharedParts) -> "NextTokens":
        return NextTokens(self, shared)


class NextTokens(HeadTerm):
    """Cross-entropy of each target's id, predicted from the state of the token before it; metric "correct".

    On rows that are not causal this term has no targets: they are then mlm's.
    """

    def __init__(self, config: ClmConfig, shared: SharedParts) -> None:
        self.head = shared.head()
        super().__init__(config, {"head": self.head})
        self._alone = True

    def connect(self, terms: Mapping[str, HeadTerm]) -> None:
        """Note whether clm is the only term, which needs causal rows (`target_count`)."""
        self._alone = terms.keys() == {self.name}

    def target_count(self, batch: "Batch") -> int:
        """Return the number of targets.

        Raises:
            ModelError: the rows are not causal, and this is the only term.
        """
        if batch.causal:
            return batch.target_ids.numel()
        if self._alone and batch.rows:
            raise ModelError(
                "clm is the only objective, but the rows are not causal: each token would see what it predicts",
                remedy="set objective.clm in the recipe, so that the data service makes causal rows",
            )
        return 0

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        import torch

        if batch.causal:
            hidden_MH, ids_M = states.previous_states, batch.target_ids
        else:
            hidden_MH, ids_M = states.target_states[:0], batch.target_ids[:0]
        at_M = torch.arange(len(ids_M), device=ids_M.device)
        found = self.head(hidden_MH, at_M, ids_M)
        return TermSums(found.loss_sum, len(ids_M), {"correct": found.correct})
