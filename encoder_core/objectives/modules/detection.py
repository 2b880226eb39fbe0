"""Replaced-token detection: a generator fills masks, and a discriminator predicts which tokens were replaced.

In ELECTRA (Clark et al. 2020) both networks share their embeddings and are updated together.

DeBERTa v3 (DeBERTaV3: He et al. 2021, section 3.2) uses gradient-disentangled embedding sharing. With E_G the
generator's embeddings, the discriminator's are stop_gradient(E_G) + E_delta, so its loss does not change E_G. A step
first updates the generator, then the discriminator, which uses the updated embeddings. All tables of the input
embeddings are shared in this way; in DeBERTa v3 that is only the word table, because absolute positions enter in the
generator's mask decoder. Each network has its own table of relative positions and its own LayerNorms, as in the paper
and microsoft/DeBERTa (rtd_task.py).
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

Part = Literal["generator", "discriminator"]  # the two networks
EMBEDDINGS_PREFIX = "encoder.embeddings."
"""Prefix of the names of the parameters that both networks may share."""


class Discriminator(nn.Module):
    """An encoder and a head, which classify every token as original or replaced."""

    def __init__(self, encoder: AnyEncoder, head: ReplacedTokenHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def logits(self, batch: Batch) -> Float[Tensor, " tokens"]:
        """Return one score per token; a positive score means replaced."""
        first_T = torch.arange(batch.tokens.numel(), device=batch.tokens.device) - batch.positions
        scores_T: Tensor = self.head(self.encoder(batch), first_T)
        return scores_T

    def forward(self, batch: Batch, replaced_T: Bool[Tensor, " tokens"]) -> DetectionSums:
        return detection_sums(batch.select_learnable(self.logits(batch)), batch.select_learnable(replaced_T))


class ReplacedTokenDetection(ObjectiveModule):
    """Generator and discriminator as one module, so that one engine trains both.

    Terms: those of the generator, including "mlm", and "rtd" over all tokens. No gradient passes through the sampled
    tokens. A sampled token that equals the original counts as original.

    Args:
        weight: factor of the discriminator's loss.
        temperature: temperature of the softmax from which the generator's tokens are sampled.
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
        """Return all terms' sums for this batch. Metrics: the generator's, and "rtd_" with each count of
        `DetectionSums`, such as "rtd_correct".
        """
        generated, drawn_M = self.generate(batch)
        detected = self.detect(batch, drawn_M)
        return LossSums(generated.terms + detected.terms, generated.metrics | detected.metrics)

    def generate(self, batch: Batch) -> tuple[LossSums, Int[Tensor, " targets"]]:
        """Return the generator's terms, and the ids that it samples for the targets."""
        return self.generator.generate(batch, self.temperature)

    def detect(self, batch: Batch, drawn_M: Int[Tensor, " targets"]) -> LossSums:
        """Return the discriminator's term "rtd", with the ids `drawn_M` in place of the masks."""
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
        """Return the generator's logits of all ids at the target positions."""
        return self.generator.logits(batch)


def shared_parameter_name(part: Part, name: str) -> str:
    """Return the name that a network's parameter `name` has in `ReplacedTokenDetection` with shared embeddings."""
    return f"generator.{name}" if name.startswith(EMBEDDINGS_PREFIX) else f"{part}.{name}"


def replace_targets(batch: Batch, drawn_M: Int[Tensor, " targets"]) -> tuple[Batch, Bool[Tensor, " tokens"]]:
    """Return the batch with the ids `drawn_M` at the targets, and [T] whether a token differs from the original."""
    replaced_T = torch.zeros_like(batch.tokens, dtype=torch.bool)
    replaced_T = replaced_T.index_copy(0, batch.target_positions, drawn_M != batch.target_ids)
    return replace(batch, tokens=batch.tokens.index_copy(0, batch.target_positions, drawn_M)), replaced_T


def discriminator_model(config: ModelConfig, *, embeddings: Embeddings | None = None) -> Discriminator:
    """Build a discriminator. (`masked_language_model(config.generator)` builds a generator.)

    `embeddings`: embeddings to share with another network; None: new ones.
    """
    encoder = config.encoder(embeddings=embeddings)
    context_eps = config.layer_norm_eps if config.context_norm else None
    head = ReplacedTokenHead(config.hidden, activation=config.activation, context_eps=context_eps)
    return Discriminator(encoder, head)


class GradientDisentangledDetection(ReplacedTokenDetection):
    """Two updates per step: first the generator with its own terms, then the discriminator with the term "rtd".

    In training, a call without memory computes the generator's terms. It returns the sampled ids as memory, so the
    discriminator's call uses ids sampled before the generator's update. In evaluation one call computes both.
    """

    def update_groups(self) -> UpdateGroups:
        """Return each network's parameters. E_G belongs to the generator."""
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
    """Return whether the discriminator's parameter of this name is a table of E_delta (see the module)."""
    return name.startswith("encoder.embeddings.") and ".norm." not in name


def task_encoder(module: ObjectiveModule) -> AnyEncoder:
    """Return the encoder that is used after pretraining: the discriminator's, or the module's only one."""
    network = module.discriminator if isinstance(module, ReplacedTokenDetection) else module
    encoder = network.encoder
    assert isinstance(encoder, AnyEncoder)
    return encoder
