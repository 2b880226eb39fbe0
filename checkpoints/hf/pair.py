"""A generator and a discriminator in transformers' format: one folder each (ELECTRA, DeBERTa v3).

Embeddings that both networks share are written into both folders. If they are gradient-disentangled, the
discriminator's folder holds what it reads, E_G + E_delta. When they are read back, E_delta is the difference from E_G,
up to rounding.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.hf.export import published, write_model
from checkpoints.hf.load import weights_for
from data_service.store.base import Store
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import DetectorConfig, ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.objectives.replaced import Part, Sharing, is_difference, stored_name

ReadParameter = Callable[[str], Tensor]


def export_pair(
    read_parameter: ReadParameter,
    config: DetectorConfig,
    tokenizer_files: Mapping[str, bytes],
    out: Store,
    sharing: Sharing = "shared",
    *,
    cards: Mapping[Part, str] | None = None,
) -> None:
    """Export to `generator/` and `discriminator/` below the root of `out`, both or none; see `export_model`.

    `read_parameter` gives a parameter by its name in the module that trains both, whole.
    """
    cards = cards or {}
    networks: dict[Part, tuple[ModelConfig, Heads]] = {
        "generator": (config.generator, "mlm"),
        "discriminator": (config, "rtd"),
    }
    with published(out) as folder:
        for part, (network, heads) in networks.items():
            read = _reader(read_parameter, part, sharing)
            write_model(folder / part, read, network, tokenizer_files, heads, card=cards.get(part))


def _reader(read_parameter: ReadParameter, part: Part, sharing: Sharing) -> ReadParameter:
    """Parameters of one network by its own names, ready to be used alone."""

    def read(name: str) -> Tensor:
        if sharing == "shared":
            return read_parameter(stored_name(part, name))
        if part == "discriminator" and is_difference(name):
            return read_parameter(f"generator.{name}") + read_parameter(f"discriminator.{name}")
        return read_parameter(f"{part}.{name}")

    return read


def pair_weights_for(config: DetectorConfig, folder: Path, sharing: Sharing = "shared") -> dict[str, Tensor]:
    """The parameters to start the module that trains both networks from, out of `generator/` and `discriminator/`.

    Raises ModelError as `weights_for`, and where networks that are to share their embeddings have different ones.
    """
    generator = weights_for(config.generator, folder / "generator", "mlm")
    discriminator = weights_for(config, folder / "discriminator", "rtd")
    if sharing == "shared":
        _check_shared(generator, discriminator, folder)
        return _named("generator", generator) | _named("discriminator", discriminator)
    own = {
        name: tensor - generator[name] if is_difference(name) else tensor
        for name, tensor in discriminator.items()
    }
    return {f"generator.{name}": tensor for name, tensor in generator.items()} | {
        f"discriminator.{name}": tensor for name, tensor in own.items()
    }


def _check_shared(generator: dict[str, Tensor], discriminator: dict[str, Tensor], folder: Path) -> None:
    differing = [
        name
        for name, tensor in sorted(generator.items())
        if name.startswith("encoder.embeddings.") and not torch.equal(tensor, discriminator[name])
    ]
    if differing:
        raise ModelError(
            f"the networks in {folder} do not share their embeddings: {', '.join(differing)} differ",
            remedy="give a generator and a discriminator that were trained together with shared embeddings, or set "
            "objective.rtd.embeddings: gradient_disentangled",
        )


def _named(part: Part, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {stored_name(part, name): tensor for name, tensor in tensors.items()}
