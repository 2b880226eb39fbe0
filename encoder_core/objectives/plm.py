"""Settings of permuted language modelling (Yang et al. 2019, section 2.2); `modules/permuted.py` computes it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig, family_names_where
from encoder_core.objectives.term import (
    HeadConfig,
    ModuleConfig,
    OmittedWeightTerm,
    Refusal,
    TermSetting,
    family_refusal,
    last_weight,
)

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from encoder_core.objectives.modules.permuted import PermutedLanguageModel


class PlmConfig(OmittedWeightTerm, ModuleConfig):
    """Permuted language modelling. The settings of the prediction order belong to the data service."""

    name = "plm"
    exported = "plm"

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse other terms, families other than XLNet, and rows that do not continue from step to step."""
        others = [name for name in setting.terms if name != self.name]
        if others:
            yield Refusal(
                ("objective",),
                f"plm cannot be combined with {others[0]}: XLNet's two streams read rows in a random order with "
                "memory, without masks",
                "remove objective.plm, or all other terms",
            )
        elif not setting.model.permutes:
            remedy = "use plm for xlnet, denoise for bart, and mlm for every other family"
            yield family_refusal("plm", setting, "it has no query stream", remedy)
        elif setting.rows is not None and not setting.rows.lanes:
            yield Refusal(
                ("objective", "plm"),
                "permuted language modelling needs rows that continue from step to step, but "
                f"{setting.rows.packing} rows do not",
                "set input.packing to lanes",
            )

    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> "PermutedLanguageModel":
        """Build encoder and head.

        Raises:
            ModelError: the family has no two-stream attention, or the size of the vocabulary is unknown.
        """
        from encoder_core.heads.prediction import MaskedLanguageModelHead
        from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
        from encoder_core.objectives.modules.permuted import PermutedLanguageModel

        encoder = model.encoder()
        if not isinstance(encoder, TwoStreamEncoder):
            raise ModelError(
                f"{model.family} cannot predict permuted tokens: it has no query stream",
                remedy=f"use a model of family {family_names_where(lambda family: family.permutes)}",
            )
        word = encoder.embeddings.word
        head = MaskedLanguageModelHead(
            model.hidden, word, activation=model.head_activation, eps=model.layer_norm_eps, bare=True
        )
        return PermutedLanguageModel(encoder, head, last_weight(self.weight))

    def weight_count(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> int:
        return super().weight_count(model) + model.vocabulary_size  # the bias of the head
