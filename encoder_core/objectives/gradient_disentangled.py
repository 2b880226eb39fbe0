"""Replaced-token detection with gradient-disentangled embedding sharing (DeBERTaV3: He et al. 2021, section 3.2).

The discriminator reads stop_gradient(E_G) + E_delta: it uses the generator's embeddings, but its loss does not change
them. A step first updates the generator, then the discriminator, which reads the updated embeddings.

Every table of the input embeddings is shared in this way. In DeBERTa v3 that is the word embedding alone: absolute
positions enter only in the generator's mask decoder, not in the encoder. Each network has its own table of relative
positions (the paper and microsoft/DeBERTa, rtd_task.py, share embeddings only) and its own LayerNorms.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.build import DetectorConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings
from encoder_core.objectives.losses import LossSums
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.multitask import multitask_model
from encoder_core.objectives.replaced import ReplacedTokenConfig, ReplacedTokenDetection, discriminator_model
from encoder_core.objectives.term import HeadConfig
from encoder_core.optim.groups import UpdateGroups


class GradientDisentangledDetection(ReplacedTokenDetection):
    """Two update groups a step: "generator" with the terms of that, then "discriminator" with the term "rtd".

    In training a call without memory is for the first group; the ids it draws come back as the memory of the second, so
    they are those of the generator before its update. In evaluation one call does both.
    """

    def update_groups(self) -> UpdateGroups:
        """The parameters of either network; E_G belongs to the generator."""
        generator = list(self.generator.parameters())
        known = {id(p) for p in generator}
        return {
            "generator": generator,
            "discriminator": [p for p in self.discriminator.parameters() if id(p) not in known],
        }

    def forward(self, batch: Batch, memory: tuple[Int[Tensor, " targets"], ...] = ()) -> LossSums:
        """Sums for this batch; metrics as `ReplacedTokenDetection`."""
        if memory:
            (drawn_M,) = memory
            return self.detect(batch, drawn_M)
        if not self.training:
            return super().forward(batch)
        generated, drawn_M = self.generate(batch)
        return replace(generated, memory=(drawn_M,))


def is_difference(name: str) -> bool:
    """Whether the discriminator's parameter of this name is a table of E_delta, to which the generator's is added."""
    return name.startswith("encoder.embeddings.") and ".norm." not in name


def gradient_disentangled_detection(
    config: DetectorConfig,
    objective: ReplacedTokenConfig,
    heads: Sequence[HeadConfig] = (MlmConfig(),),
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> GradientDisentangledDetection:
    """Both networks on the default device; weights not yet initialised (`initialise`: E_delta begins at zero).

    `heads` are the generator's terms; `attend` is the kernel of plain attention. Raises ModelError if the
    configuration's vocabulary is unknown.
    """
    generator = multitask_model(
        config.generator, heads, checkpoint_activations=checkpoint_activations, attend=attend
    )
    discriminator = discriminator_model(config, checkpoint_activations=checkpoint_activations, attend=attend)
    base, own = generator.encoder.embeddings, discriminator.encoder.embeddings
    assert isinstance(base, Embeddings)  # of every family with a generator
    assert isinstance(own, Embeddings)
    own.disentangle_from(base)
    return GradientDisentangledDetection(generator, discriminator, objective)
