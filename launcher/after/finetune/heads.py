"""Our own head on an encoder of transformers, which mixes several layers and has poolings that the classes of
transformers lack.

It serves tagging and frozen features (Devlin et al. 2019, table 7; Peters et al. 2018).
`launcher.after.finetune.export` describes how such a model is exported.
"""

from collections.abc import Sequence
from typing import Literal, Self, assert_never

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from launcher.after.finetune.settings import Layers

_FOUR = 4


class HeadConfig(BaseModel):
    """The configuration of a head.

    Attributes:
        hidden: width of the encoder.
        states: number of the encoder's hidden states: one for the embeddings and one for each layer.
        outputs: number of outputs for each text, or for each piece.
        layers: which hidden states the head reads.
        pooling: pooling of a text; None if the head has outputs for each piece.
        left: whether padding is on the left, so that the class piece is the last one.
        dropout: rate of the dropout before the output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    hidden: int = Field(ge=1)
    states: int = Field(ge=2)
    outputs: int = Field(ge=1)
    layers: Layers
    pooling: Literal["cls", "mean", "max"] | None
    left: bool
    dropout: float = Field(ge=0, lt=1)

    @model_validator(mode="after")
    def _enough_layers(self) -> Self:
        if self.layers == "last_four" and self.states <= _FOUR:
            raise ValueError(f"layers last_four: the encoder has {self.states - 1}")
        return self


class MixedHead(nn.Module):
    """Dropout and a linear map over a mixture of layers."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden * (_FOUR if config.layers == "last_four" else 1)
        if config.layers == "weighted":
            self.weights = nn.Parameter(torch.zeros(config.states))
            self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.outputs)

    def forward(self, hidden: Sequence[Tensor], mask: Tensor) -> Tensor:
        """Return the outputs: [rows, outputs], or [rows, pieces, outputs] without pooling.

        Args:
            hidden: hidden states of the embeddings and of each layer, [rows, pieces, hidden] each.
            mask: [rows, pieces] int64: 1 for pieces, 0 for padding.
        """
        mixed = self._mixed(hidden)
        return self.output(self.dropout(mixed if self.config.pooling is None else self._pooled(mixed, mask)))  # type: ignore[no-any-return]

    def _mixed(self, hidden: Sequence[Tensor]) -> Tensor:
        match self.config.layers:
            case "last":
                return hidden[-1]
            case "last_four":
                return torch.cat(tuple(hidden[-_FOUR:]), dim=-1)
            case "weighted":
                shares = self.weights.softmax(0)
                return self.scale * sum(
                    (share * state for share, state in zip(shares, hidden, strict=True)), torch.zeros(())
                )
        assert_never(self.config.layers)

    def _pooled(self, mixed: Tensor, mask: Tensor) -> Tensor:
        here = mask[..., None].bool()
        match self.config.pooling:
            case "mean":
                return mixed.masked_fill(~here, 0).sum(1) / here.sum(1)
            case "max":
                return mixed.masked_fill(~here, -torch.inf).amax(1)
            case _:
                return mixed[:, -1 if self.config.left else 0]
