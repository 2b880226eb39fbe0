"""ELECTRA's two networks in transformers' format: one folder each, their common embeddings in both."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from checkpoints.hf.export import export_model
from checkpoints.hf.load import weights_for
from data_service.store.base import Store
from encoder_core.errors import ModelError
from encoder_core.families.electra import ElectraConfig
from encoder_core.objectives.replaced import stored_name

Part = Literal["generator", "discriminator"]


def export_pair(
    read_parameter: Callable[[str], Tensor],
    config: ElectraConfig,
    tokenizer_files: Mapping[str, bytes],
    out: Store,
) -> None:
    """Export to `generator/` and `discriminator/` below the root of `out`; see `export_model`.

    `read_parameter` gives a parameter of `ReplacedTokenDetection` by its name there, whole.
    """

    def of(part: Part) -> Callable[[str], Tensor]:
        return lambda name: read_parameter(stored_name(part, name))

    export_model(of("generator"), config.generator, tokenizer_files, out.at("generator"), "mlm")
    export_model(of("discriminator"), config, tokenizer_files, out.at("discriminator"), "rtd")


def pair_weights_for(config: ElectraConfig, folder: Path) -> dict[str, Tensor]:
    """The parameters to start `ReplacedTokenDetection` from, out of `generator/` and `discriminator/` in `folder`.

    Raises ModelError as `weights_for`, and where the two networks' embeddings differ.
    """
    tensors: dict[str, Tensor] = {}
    tensors |= _of("generator", weights_for(config.generator, folder / "generator", "mlm"))
    second = _of("discriminator", weights_for(config, folder / "discriminator", "rtd"))
    differing = [
        name for name in tensors.keys() & second.keys() if not torch.equal(tensors[name], second[name])
    ]
    if differing:
        raise ModelError(
            f"the networks in {folder} do not share their embeddings: {', '.join(sorted(differing))} differ",
            remedy="give a generator and a discriminator that were trained together",
        )
    return tensors | second


def _of(part: Part, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {stored_name(part, name): tensor for name, tensor in tensors.items()}
