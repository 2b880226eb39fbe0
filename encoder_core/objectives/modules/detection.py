"""Replaced-token detection: a generator fills the masks, a discriminator predicts which tokens it replaced.

ELECTRA (Clark et al. 2020) updates both networks at once, and they share their embeddings.

DeBERTa v3 (DeBERTaV3: He et al. 2021, section 3.2) shares them gradient-disentangled. The discriminator reads
stop_gradient(E_G) + E_delta: it uses the generator's embeddings, but its loss does not change them. A step first
updates the generator, then the discriminator, which reads the updated embeddings. Every table of the input embeddings
is shared in this way; in DeBERTa v3 that is only the word embedding, because absolute positions enter in the
generator's mask decoder. Each network has its own table of relative positions and its own LayerNorms (the paper and
microsoft/DeBERTa, rtd_task.py, share embeddings only).
"""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.classification import DetectionSums, ReplacedTokenHead, detection_sums
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.encoder import Embeddings
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.optim.groups import UpdateGroups

Part = Literal["generator", "discriminator"]
EMBEDDINGS_PREFIX = "encoder.embeddings."
"""Prefix of the names of parameters that both networks may share."""


class Discriminator(nn.Module):
    """An encoder and a head that classify every token as original or replaced."""

    def __init__(self, encoder: AnyEncoder, head: ReplacedTokenHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def logits(self, batch: Batch) -> Float[Tensor, " tokens"]:
        """Return one score a token; a positive score means replaced."""
        first_T = torch.arange(batch.tokens.numel(), device=batch.tokens.device) - batch.positions
        scores_T: Tensor = self.head(self.encoder(batch), first_T)
        return scores_T

    def forward(self, batch: Batch, replaced_T: Bool[Tensor, " tokens"]) -> DetectionSums:
        return detection_sums(batch.select_learnable(self.logits(batch)), batch.select_learnable(replaced_T))


class ReplacedTokenDetection(ObjectiveModule):
    """Both networks as one module with one set of embeddings, so that one engine trains them together.

    Terms: those of the generator, including "mlm", and "rtd" over all tokens, weighted. No gradient passes through
    the generator's choice. A drawn token that equals the original counts as original.

    Args:
        weight: factor of the discriminator's loss.
        temperature: temperature of the softmax from which the generator's tokens are drawn.
    """

    def __init__(
        self, generator: MultitaskModel, discriminator: Discriminator, *, weight: float, temperature: float
    ) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.weight = weight
        self.temperature = temperature

    def target_counts(self, batch: Batch) -> dict[str, int]:
        return self.generator.target_counts(batch) | {"rtd": batch.loss_token_count}

    def forward(self, batch: Batch) -> LossSums:
        """Return the sums for this batch; metrics: the generator's, "rtd_correct", "rtd_replaced", "rtd_flagged",
        "rtd_found".
        """
        generated, drawn_M = self.generate(batch)
        detected = self.detect(batch, drawn_M)
        return LossSums(generated.terms + detected.terms, generated.metrics | detected.metrics)

    def generate(self, batch: Batch) -> tuple[LossSums, Int[Tensor, " targets"]]:
        """Return the generator's terms, and the ids that it draws for the targets."""
        return self.generator.generate(batch, self.temperature)

    def detect(self, batch: Batch, drawn_M: Int[Tensor, " targets"]) -> LossSums:
        """Return the discriminator's term, `heads/classification.py`'s, on the batch with `drawn_M` at its targets."""
        sums: DetectionSums = self.discriminator(*replace_targets(batch, drawn_M))
        term = Term("rtd", sums.loss_sum, batch.loss_token_count, self.weight)
        metrics = {
            "rtd_correct": sums.correct,
            "rtd_replaced": sums.replaced,
            "rtd_flagged": sums.flagged,
            "rtd_found": sums.found,
        }
        return LossSums((term,), metrics)

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Return the generator's scores of all ids at the target positions."""
        return self.generator.logits(batch)


def shared_parameter_name(part: Part, name: str) -> str:
    """Return the name in `ReplacedTokenDetection` of one network's parameter; shared embeddings are stored once."""
    return f"generator.{name}" if name.startswith(EMBEDDINGS_PREFIX) else f"{part}.{name}"


def replace_targets(batch: Batch, drawn_M: Int[Tensor, " targets"]) -> tuple[Batch, Bool[Tensor, " tokens"]]:
    """Return the batch with drawn ids at the target positions, and which tokens now differ from the original text."""
    replaced_T = torch.zeros_like(batch.tokens, dtype=torch.bool)
    replaced_T = replaced_T.index_copy(0, batch.target_positions, drawn_M != batch.target_ids)
    return replace(batch, tokens=batch.tokens.index_copy(0, batch.target_positions, drawn_M)), replaced_T


def discriminator_model(config: ModelConfig, *, embeddings: Embeddings | None = None) -> Discriminator:
    """Build a discriminator alone. A generator alone is `masked_language_model(config.generator)`.

    `embeddings` are shared with another network; None: its own. DeBERTa's head also reads the row's first token.
    """
    encoder = config.encoder(embeddings=embeddings)
    context_eps = config.layer_norm_eps if config.context_norm else None
    head = ReplacedTokenHead(config.hidden, activation=config.activation, context_eps=context_eps)
    return Discriminator(encoder, head)


class GradientDisentangledDetection(ReplacedTokenDetection):
    """Two update groups a step: "generator" with the generator's terms, then "discriminator" with the term "rtd".

    In training a call without memory is for the first group. The ids it draws are the memory of the second group, so
    they are those of the generator before its update. In evaluation one call does both.
    """

    def update_groups(self) -> UpdateGroups:
        """Return the parameters of either network; E_G belongs to the generator."""
        generator = list(self.generator.parameters())
        known = {id(p) for p in generator}
        return {
            "generator": generator,
            "discriminator": [p for p in self.discriminator.parameters() if id(p) not in known],
        }

    def forward(self, batch: Batch, memory: tuple[Int[Tensor, " targets"], ...] = ()) -> LossSums:
        """Return the sums for this batch; metrics as in `ReplacedTokenDetection`."""
        if memory:
            (drawn_M,) = memory
            return self.detect(batch, drawn_M)
        if not self.training:
            return super().forward(batch)
        generated, drawn_M = self.generate(batch)
        return replace(generated, memory=(drawn_M,))


def is_embedding_difference(name: str) -> bool:
    """Return whether the discriminator's parameter of this name is a table of E_delta, to which the generator's is
    added.
    """
    return name.startswith("encoder.embeddings.") and ".norm." not in name


def task_encoder(module: ObjectiveModule) -> AnyEncoder:
    """Return the encoder that is used after pretraining: the only one, or the discriminator's."""
    network = module.discriminator if isinstance(module, ReplacedTokenDetection) else module
    encoder = network.encoder
    assert isinstance(encoder, AnyEncoder)
    return encoder
