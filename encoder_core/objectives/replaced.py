"""Replaced-token detection (ELECTRA: Clark et al. 2020): a generator fills the masks, a discriminator says which
tokens it replaced. Both learn at once here; DeBERTa v3's way is in `gradient_disentangled.py`."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families import deberta, electra
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.heads.classification import DetectionSums, ReplacedTokenHead, detection_sums
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import Embeddings, Encoder
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.mlm import MaskedLanguageModel, masked_language_model

DetectorConfig = ElectraConfig | DebertaV2Config
"""Families that come with a generator."""

Part = Literal["generator", "discriminator"]
EMBEDDINGS = "encoder.embeddings."
"""How the names of parameters begin that both networks may share."""
Sharing = Literal["shared", "gradient_disentangled"]


class ReplacedTokenConfig(BaseModel):
    """How the two networks are trained together.

    Attributes:
        weight: factor of the discriminator's loss (ELECTRA's lambda).
        temperature: of the softmax that the generator's tokens are drawn from.
        embeddings: shared is ELECTRA's way: one set, one update of both networks. gradient_disentangled is DeBERTa
            v3's: the discriminator's are the generator's plus a difference of its own, and only the difference learns
            from it; the generator is updated first, then the discriminator, by an optimizer and a clipping each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=50.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    embeddings: Sharing = "shared"


class Discriminator(nn.Module):
    """An encoder that judges every token."""

    def __init__(self, encoder: Encoder | DisentangledEncoder, head: ReplacedTokenHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def logits(self, batch: Batch) -> Float[Tensor, " tokens"]:
        """One score a token; positive means replaced."""
        first_T = torch.arange(batch.tokens.numel(), device=batch.tokens.device) - batch.positions
        scores_T: Tensor = self.head(self.encoder(batch), first_T)
        return scores_T

    def forward(self, batch: Batch, replaced_T: Bool[Tensor, " tokens"]) -> DetectionSums:
        return detection_sums(self.logits(batch), replaced_T)


class ReplacedTokenDetection(ObjectiveModule):
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
        """Sums for this batch; metrics: "mlm_correct", "rtd_correct", "rtd_replaced", "rtd_flagged", "rtd_found"."""
        generated, drawn_M = self.generate(batch)
        detected = self.detect(batch, drawn_M)
        return LossSums(generated.terms + detected.terms, generated.metrics | detected.metrics)

    def generate(self, batch: Batch) -> tuple[LossSums, Int[Tensor, " targets"]]:
        """The generator's term, and the ids it draws for the targets."""
        sums = self.generator.predict(batch, self.config.temperature)
        assert sums.sampled is not None  # asked for, by the temperature
        term = Term("mlm", sums.loss_sum, batch.target_ids.numel())
        return LossSums((term,), {"mlm_correct": sums.correct}), sums.sampled

    def detect(self, batch: Batch, drawn_M: Int[Tensor, " targets"]) -> LossSums:
        """The discriminator's term on the batch with `drawn_M` at its targets."""
        sums: DetectionSums = self.discriminator(*corrupt(batch, drawn_M))
        term = Term("rtd", sums.loss_sum, batch.tokens.numel(), self.config.weight)
        metrics = {
            "rtd_correct": sums.correct,
            "rtd_replaced": sums.replaced,
            "rtd_flagged": sums.flagged,
            "rtd_found": sums.found,
        }
        return LossSums((term,), metrics)

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """The generator's scores of all ids at the target positions."""
        return self.generator.logits(batch)


def stored_name(part: Part, name: str) -> str:
    """A parameter of one network by its name in `ReplacedTokenDetection`, where the embeddings are stored once."""
    return f"generator.{name}" if name.startswith(EMBEDDINGS) else f"{part}.{name}"


def corrupt(batch: Batch, drawn_M: Int[Tensor, " targets"]) -> tuple[Batch, Bool[Tensor, " tokens"]]:
    """The batch with drawn ids at the target positions, and which tokens now differ from the original text."""
    replaced_T = torch.zeros_like(batch.tokens, dtype=torch.bool)
    replaced_T = replaced_T.index_copy(0, batch.target_positions, drawn_M != batch.target_ids)
    return replace(batch, tokens=batch.tokens.index_copy(0, batch.target_positions, drawn_M)), replaced_T


def replaced_token_detection(
    config: DetectorConfig,
    objective: ReplacedTokenConfig,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> ReplacedTokenDetection:
    """Both networks on the default device, embeddings shared; weights not yet initialised (`initialise`).

    `attend` is the kernel of plain attention. Raises ModelError if the configuration's vocabulary is unknown.
    """
    generator = masked_language_model(
        config.generator, checkpoint_activations=checkpoint_activations, attend=attend
    )
    embeddings = generator.encoder.embeddings
    assert isinstance(embeddings, Embeddings)  # of both families
    discriminator = discriminator_model(
        config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
    )
    return ReplacedTokenDetection(generator, discriminator, objective)


def discriminator_model(
    config: DetectorConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> Discriminator:
    """A discriminator alone, on `embeddings` shared with another network if given. A generator alone is
    `masked_language_model(config.generator)`."""
    encoder: Encoder | DisentangledEncoder
    if isinstance(config, ElectraConfig):
        encoder = electra.build(
            config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
        )
        return Discriminator(encoder, ReplacedTokenHead(config.hidden, activation=config.activation))
    encoder = deberta.build(config, embeddings=embeddings, checkpoint_activations=checkpoint_activations)
    head = ReplacedTokenHead(config.hidden, activation=config.activation, context_eps=config.layer_norm_eps)
    return Discriminator(encoder, head)
