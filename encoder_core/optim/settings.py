"""Settings of the optimizers, in a file of their own, so that reading a recipe does not import torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Decayed = Literal["no_bias_norm", "all", "xlnet"]
"""Which parameters weight decay acts on. `no_bias_norm`: all but biases and LayerNorm (google-research/bert, electra,
albert; microsoft/DeBERTa). `all`: all (fairseq, facebookresearch/SpanBERT). `xlnet`: as `no_bias_norm`, plus XLNet's
three attention biases (zihangdai/xlnet, model_utils.py)."""

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]  # decay rate of a moment or momentum


class OptimizerSettings(BaseModel):
    """The settings that all optimizers have.

    Attributes:
        lr: peak learning rate, which the schedule scales.
        betas: decay rates of the first and the second moment.
        eps: number added to the root of the second moment.
        weight_decay: rate of decoupled weight decay, multiplied by the learning rate.
        decayed: which parameters have weight decay.
        clip: maximum global norm of the gradient, enforced before the update; null: no clipping.
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
        bias_correction: whether the moments are divided by 1 - beta^t, as in Adam; false: BERT's update.
    """

    bias_correction: bool = True


class StableAdamWConfig(OptimizerSettings):
    """Settings of StableAdamW; the defaults are those of its usual implementation (warner-benjamin/optimi).

    Update clipping lowers the learning rate, and replaces `clip`. `eps` is also the lower limit of the root of the
    second moment, by which update clipping divides gradients. `weight_decay` is multiplied by the learning rate: to
    reproduce a fully decoupled decay (ModernBERT's 1e-5), divide it by the peak learning rate.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.99)
    clip: float | None = Field(default=None, gt=0.0)


class AverageConfig(BaseModel):
    """The exponential moving average of the weights that a training run keeps.

    Attributes:
        ema: decay of the average, which begins as a copy of the run's first weights. After each update: average = ema
            average + (1 - ema) weight. Rounding to float32 limits its relative accuracy to about 1e-7 / (1 - ema).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ema: float = Field(gt=0.0, le=0.99999)


class LambConfig(OptimizerSettings):
    """Settings of LAMB; the defaults are ALBERT's (google-research/albert, lamb_optimizer.py). Weight decay is added
    to the update before the norm of the update is computed.

    Attributes:
        bias_correction: whether the moments are divided by 1 - beta^t, as in the paper; false: ALBERT's update.
    """

    bias_correction: bool = False


class MuonConfig(OptimizerSettings):
    """Settings of Muon; the defaults are Moonlight's (MoonshotAI/Moonlight, examples/toy_train.py).

    `betas` and `eps` are for AdamW, which updates all parameters except hidden matrices; learning rate and weight
    decay are for all. `clip` limits a step's contribution to the momentum, not the size of a matrix's update.

    Attributes:
        momentum: decay rate mu of a hidden matrix's momentum.
    """

    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)
