"""ELECTRA (Clark et al., 2020): a generator fills the masks, a discriminator says which tokens it replaced."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families import electra
from encoder_core.families.electra import ElectraConfig
from encoder_core.heads.replaced import DetectionSums, ReplacedTokenHead
from encoder_core.layers.embeddings import Embeddings
from encoder_core.layers.encoder import Encoder
from encoder_core.layers.kernels import Attend, automatic
from encoder_core.objectives.losses import LossSums, Objective, Term
from encoder_core.objectives.mlm import MaskedLanguageModel, masked_language_model


class ReplacedTokenConfig(BaseModel):
    """How the two networks are trained together.

    Attributes:
        weight: factor of the discriminator's loss (ELECTRA's lambda).
        temperature: of the softmax that the generator's tokens are drawn from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=50.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)


class Discriminator(nn.Module):
    """An encoder that judges every token."""

    def __init__(self, encoder: Encoder, head: ReplacedTokenHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def logits(self, batch: Batch) -> Float[Tensor, " tokens"]:
        """One score a token; positive means replaced."""
        return self.head.logits(self.encoder(batch))

    def forward(self, batch: Batch, replaced_T: Bool[Tensor, " tokens"]) -> DetectionSums:
        sums: DetectionSums = self.head(self.encoder(batch), replaced_T)
        return sums


class ReplacedTokenDetection(Objective):
    """Both networks as one module with one set of embeddings, so that one engine trains them together.

    Terms: "mlm" over the generator's targets, and "rtd" over all tokens, weighted. No gradient passes through the
    generator's choice. A drawn token that equals the original counts as original.
    """

    def __init__(
        self, generator: MaskedLanguageModel, discriminator: Discriminator, config: ReplacedTokenConfig
    ) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.config = config

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        return {"mlm": batch.target_ids.numel(), "rtd": batch.tokens.numel()}

    def forward(self, batch: Batch) -> LossSums:
        """Sums for this batch; metrics: "mlm_correct", "rtd_correct", "rtd_replaced", "rtd_flagged", "rtd_found".

        Precision is found / flagged, recall found / replaced.
        """
        hidden_TH = self.generator.encoder(batch)
        loss_sum, correct, sampled_M = self.generator.head(
            hidden_TH, batch.target_positions, batch.target_ids, self.config.temperature
        )
        corrupted, replaced_T = corrupt(batch, sampled_M)
        detected: DetectionSums = self.discriminator(corrupted, replaced_T)
        counts = self.target_counts(batch)
        terms = (
            Term("mlm", loss_sum, counts["mlm"]),
            Term("rtd", detected.loss_sum, counts["rtd"], self.config.weight),
        )
        metrics = {
            "mlm_correct": correct,
            "rtd_correct": detected.correct,
            "rtd_replaced": detected.replaced,
            "rtd_flagged": detected.flagged,
            "rtd_found": detected.found,
        }
        return LossSums(terms, metrics)

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """The generator's scores of all ids at the target positions."""
        return self.generator.logits(batch)


def stored_name(part: Literal["generator", "discriminator"], name: str) -> str:
    """A parameter of one network by its name in `ReplacedTokenDetection`, where the embeddings are stored once."""
    return f"generator.{name}" if name.startswith("encoder.embeddings.") else f"{part}.{name}"


def corrupt(batch: Batch, drawn_M: Int[Tensor, " targets"]) -> tuple[Batch, Bool[Tensor, " tokens"]]:
    """The batch with drawn ids at the target positions, and which tokens now differ from the original text."""
    replaced_T = torch.zeros_like(batch.tokens, dtype=torch.bool)
    replaced_T = replaced_T.index_copy(0, batch.target_positions, drawn_M != batch.target_ids)
    return replace(batch, tokens=batch.tokens.index_copy(0, batch.target_positions, drawn_M)), replaced_T


def replaced_token_detection(
    config: ElectraConfig,
    objective: ReplacedTokenConfig,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> ReplacedTokenDetection:
    """Both networks on the default device, embeddings shared; weights not yet initialised (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    generator = masked_language_model(
        config.generator, checkpoint_activations=checkpoint_activations, attend=attend
    )
    embeddings = generator.encoder.embeddings
    assert isinstance(embeddings, Embeddings)  # the family's own
    encoder = electra.build(
        config,
        embeddings=embeddings,
        checkpoint_activations=checkpoint_activations,
        attend=attend,
    )
    return ReplacedTokenDetection(generator, _discriminator(config, encoder), objective)


def discriminator_model(
    config: ElectraConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> Discriminator:
    """A discriminator alone. A generator alone is `masked_language_model(config.generator)`."""
    encoder = electra.build(config, checkpoint_activations=checkpoint_activations, attend=attend)
    return _discriminator(config, encoder)


def _discriminator(config: ElectraConfig, encoder: Encoder) -> Discriminator:
    return Discriminator(encoder, ReplacedTokenHead(config.hidden, activation=config.activation))
