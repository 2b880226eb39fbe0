"""Settings of the optimizers. They are apart from the optimizers, so that reading a recipe does not import torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Decayed = Literal["no_bias_norm", "all", "xlnet"]
"""Which parameters weight decay acts on. `no_bias_norm`: all but biases and LayerNorm (google-research/bert, electra,
albert; microsoft/DeBERTa). `all`: all (fairseq, facebookresearch/SpanBERT). `xlnet`: as `no_bias_norm`, and XLNet's
three attention biases as well (zihangdai/xlnet, model_utils.py)."""


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSettings(BaseModel):
    """What all optimizers have.

    Attributes:
        lr: peak learning rate, which the schedule scales.
        betas: decay rates of the first and the second moment.
        eps: number added to the root of the second moment.
        weight_decay: rate of decoupled weight decay, multiplied by the learning rate.
        decayed: the parameters that decay.
        clip: maximum global norm of the gradient, enforced before the update; null for no clipping.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(gt=0.0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    decayed: Decayed = "no_bias_norm"
    clip: float | None = Field(default=1.0, gt=0.0)


class AdamWConfig(OptimizerSettings):
    """Settings of AdamW.

    Attributes:
        bias_correction: whether the moments are divided by 1 - beta^t (Adam); false is BERT's update.
    """

    bias_correction: bool = True


class StableAdamWConfig(OptimizerSettings):
    """Settings of StableAdamW; the defaults are those of its usual implementation (warner-benjamin/optimi).

    Update clipping lowers the learning rate, and replaces `clip`. `eps`: a squared gradient is compared with at least
    its square. `weight_decay`: a fully decoupled rate, which a run multiplies by its share of the peak rate only
    (ModernBERT's 1e-5), equals this one times the peak rate: give the quotient.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    clip: float | None = Field(default=None, gt=0.0)


class AverageConfig(BaseModel):
    """An average of the weights, kept beside them.

    Attributes:
        ema: decay of an exponential moving average, which begins at the run's first weights: after each update
            average = ema average + (1 - ema) weight. In float32 the average follows a weight to within about
            1e-7 / (1 - ema) of its size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ema: float = Field(gt=0.0, le=0.99999)


class LambConfig(OptimizerSettings):
    """Settings of LAMB; the defaults are ALBERT's (google-research/albert, lamb_optimizer.py). Decay is added to the
    update before its norm is computed.

    Attributes:
        bias_correction: whether the moments are divided by 1 - beta^t (the paper); false is ALBERT's update.
    """

    bias_correction: bool = False


class MuonConfig(OptimizerSettings):
    """Settings of Muon; the defaults are Moonlight's (MoonshotAI/Moonlight, examples/toy_train.py).

    `betas` and `eps` are AdamW's, for parameters that are no hidden matrices; learning rate and decay are those of all.
    `clip` changes how much a step counts in the momentum, but not how far a matrix moves.

    Attributes:
        momentum: decay rate of the sum of gradients of a hidden matrix.
    """

    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)
