"""Settings of replaced-token detection (ELECTRA, DeBERTa v3); `modules/detection.py` has the papers and computes it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.term import (
    HeadConfig,
    ModuleConfig,
    Refusal,
    TermSetting,
    Weight,
    last_weight,
    require_mlm,
)
from encoder_core.objectives.weights import detector_weight_count, network_weight_count

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from encoder_core.objectives.modules.detection import ReplacedTokenDetection

Sharing = Literal["shared", "gradient_disentangled"]  # see `ReplacedTokenConfig.embeddings`


class ReplacedTokenConfig(ModuleConfig):
    """Replaced-token detection by a discriminator. A second network, the generator, is trained with all other terms.

    Attributes:
        weight: factor of the discriminator's loss (ELECTRA's lambda).
        temperature: temperature of the softmax from which the generator's tokens are sampled.
        embeddings: shared (ELECTRA): both networks have the same embeddings and are updated together.
            gradient_disentangled (DeBERTa v3): the discriminator's embeddings are the generator's plus a difference,
            and the discriminator's loss trains only the difference. The generator is updated first, then the
            discriminator, each with its own gradient clipping.
    """

    name = "rtd"

    weight: Weight = 50.0
    temperature: float = Field(default=1.0, gt=0)
    embeddings: Sharing = "shared"

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, which trains the generator, and families without a generator."""
        why = "mlm trains the generator, which makes the replacements to detect"
        yield from require_mlm(self.name, setting, why)
        if not setting.model.has_generator:
            yield Refusal(
                ("objective",),
                f"a model of family {setting.model.family} has no generator, the smaller network that fills masks for "
                "rtd",
                "choose another family, or remove objective.rtd",
            )

    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = (MlmConfig(),)) -> "ReplacedTokenDetection":
        """Build both networks. `heads`: the generator's terms."""
        from encoder_core.layers.encoder import Embeddings
        from encoder_core.objectives.modules.detection import (
            GradientDisentangledDetection,
            ReplacedTokenDetection,
            discriminator_model,
        )
        from encoder_core.objectives.modules.multitask import multitask_model

        generator = multitask_model(model.generator, heads)
        base = generator.encoder.embeddings
        assert isinstance(base, Embeddings)  # every family with a generator has this class
        if self.embeddings == "shared":
            kind, discriminator = (
                ReplacedTokenDetection,
                discriminator_model(model, embeddings=base),
            )
        else:
            kind, discriminator = GradientDisentangledDetection, discriminator_model(model)
            own = discriminator.encoder.embeddings
            assert isinstance(own, Embeddings)
            own.disentangle_from(base)
        return kind(generator, discriminator, weight=last_weight(self.weight), temperature=self.temperature)

    def weight_count(self, model: ModelConfig, heads: Sequence[HeadConfig] = (MlmConfig(),)) -> int:
        shared = 0 if self.embeddings == "gradient_disentangled" else model.embedding_weight_count()
        return network_weight_count(model.generator, heads) + detector_weight_count(model) - shared
