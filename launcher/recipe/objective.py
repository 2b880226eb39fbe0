"""What a recipe's `objective` says, and the module that trains it.

An objective is composed of parts: masked language modelling, alone or with a pair task, a span boundary task or
a discriminator; or permuted language modelling; or contrastive training of text vectors. Its host half (what is
masked) goes to the data service, its device half (the losses) is the module that the engine wraps.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.spec import Masking
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.build import AnyEncoder, ModelConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.hf.interchange import Heads
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.contrastive import ContrastiveConfig, contrastive_model
from encoder_core.objectives.gradient_disentangled import gradient_disentangled_detection
from encoder_core.objectives.losses import ObjectiveModule as ObjectiveModule
from encoder_core.objectives.mlm import masked_language_model
from encoder_core.objectives.mlm_pair import masked_language_model_with_pairs
from encoder_core.objectives.plm import permuted_language_model
from encoder_core.objectives.replaced import (
    DetectorConfig,
    ReplacedTokenConfig,
    ReplacedTokenDetection,
    replaced_token_detection,
)
from encoder_core.objectives.span_boundary import span_boundary_model
from launcher.recipe.parts import Choice


class ExtraTerm(BaseModel):
    """A further term of the loss, and its weight beside masked language modelling's 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(default=1.0, gt=0)


class RecipeObjective(Choice):
    """What is predicted.

    Attributes:
        mlm: masked tokens (BERT and most others); the masks of the generator with `rtd`.
        nsp: whether the second segment follows the first (BERT). Needs input of segment or sentence pairs.
        sop: whether two segments are in order (ALBERT). Needs input of ordered pairs.
        sbo: masked spans from their boundaries (SpanBERT).
        rtd: which tokens a generator replaced (ELECTRA, DeBERTa v3).
        plm: tokens in a random factorisation order (XLNet). Needs input of lanes; stands alone.
        contrastive: which texts belong together. Needs input of pairs or sentences; any family; stands alone.
    """

    mlm: MlmMasking | None = None
    nsp: ExtraTerm | None = None
    sop: ExtraTerm | None = None
    sbo: ExtraTerm | None = None
    rtd: ReplacedTokenConfig | None = None
    plm: PermutedPrediction | None = None
    contrastive: ContrastiveConfig | None = None

    @model_validator(mode="after")
    def _compose(self) -> Self:
        given = [name for name in ("mlm", "plm", "contrastive") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("choose exactly one of mlm, plm and contrastive")
        extra = [name for name in ("nsp", "sop", "sbo", "rtd") if getattr(self, name) is not None]
        if extra and self.mlm is None:
            raise ValueError(f"{extra[0]} goes with mlm, not with {given[0]}")
        if len(extra) > 1:
            raise ValueError(f"choose one of {' and '.join(extra)} beside mlm")
        return self

    @property
    def masking(self) -> Masking:
        """The host half."""
        return self.mlm or self.plm or NoMasking()


def objective_module(
    config: ModelConfig, objective: RecipeObjective, *, checkpoint_activations: bool = False
) -> ObjectiveModule:
    """The module that trains `objective` on a model of `config`; weights not yet initialised (`initialise`).

    Raises ModelError: the family cannot be trained so, or its vocabulary is unknown.
    """
    wrong = misfit(config, objective)
    if wrong is not None:
        raise ModelError(wrong, remedy="see `maskfleet recipe list` for what goes together")
    if objective.contrastive is not None:
        return contrastive_model(config, objective.contrastive, checkpoint_activations=checkpoint_activations)
    if objective.plm is not None and isinstance(config, XlnetConfig):
        return permuted_language_model(config, checkpoint_activations=checkpoint_activations)
    if objective.rtd is not None and isinstance(config, DetectorConfig):
        disentangled = objective.rtd.embeddings == "gradient_disentangled"
        build = gradient_disentangled_detection if disentangled else replaced_token_detection
        return build(config, objective.rtd, checkpoint_activations=checkpoint_activations)
    if objective.nsp is not None:
        return masked_language_model_with_pairs(
            config, "nsp", objective.nsp.weight, checkpoint_activations=checkpoint_activations
        )
    if objective.sop is not None:
        return masked_language_model_with_pairs(
            config, "sop", objective.sop.weight, checkpoint_activations=checkpoint_activations
        )
    if objective.sbo is not None:
        return span_boundary_model(
            config, objective.sbo.weight, checkpoint_activations=checkpoint_activations
        )
    return masked_language_model(config, checkpoint_activations=checkpoint_activations)


def misfit(config: ModelConfig, objective: RecipeObjective) -> str | None:
    """Why a family cannot be trained by an objective; None if it can."""
    if objective.contrastive is not None:
        return None
    if (objective.plm is not None) != isinstance(config, XlnetConfig):
        return f"a model of family {config.family} is not trained by {'plm' if objective.plm else 'mlm'}"
    if objective.rtd is not None and not isinstance(config, DetectorConfig):
        return f"a model of family {config.family} has no generator for rtd"
    if isinstance(config, ElectraConfig) and objective.rtd is None:
        return "a model of family electra is trained by rtd"
    return None


def exported_heads(config: ModelConfig, objective: RecipeObjective) -> Heads:
    """Which heads of a single network a class of transformers can hold: its language-model head, and BERT's and
    ALBERT's pair head. None for an encoder of text vectors."""
    if objective.contrastive is not None:
        return "none"
    if objective.plm is not None:
        return "plm"
    pairs = objective.nsp is not None or objective.sop is not None
    return "mlm_pair" if pairs and isinstance(config, BertConfig | AlbertConfig) else "mlm"


def task_encoder(module: ObjectiveModule) -> AnyEncoder:
    """The encoder that is used after pretraining: the only one, or the discriminator's."""
    network = module.discriminator if isinstance(module, ReplacedTokenDetection) else module
    encoder = network.encoder
    assert isinstance(encoder, AnyEncoder)
    return encoder


def parameter_count(module: nn.Module) -> int:
    """Trainable parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def meta_module(config: ModelConfig, objective: RecipeObjective) -> ObjectiveModule:
    """The module without memory: for its names, shapes and size."""
    with on_meta():
        return objective_module(config, objective)
