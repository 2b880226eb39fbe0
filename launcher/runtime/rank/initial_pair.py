"""A pair of networks that begins from the folder of one, for instance of DeBERTa v3.

The folder holds the discriminator without its generator. The generator begins as a student of the discriminator does:
with its embeddings, and with its layers evenly from the first to the last. Its head begins anew.
With gradient-disentangled embeddings (DeBERTaV3: He et al. 2021, section 3.2) the generator's table is the
folder's, and the discriminator's difference from it begins at zero.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.hf.folder import CONFIG, NETWORKS
from checkpoints.hf.load import differing_settings, weights_for
from encoder_core.families.catalogue import DetectorConfig
from encoder_core.families.interchange import ENCODER
from encoder_core.objectives.replaced import is_difference, stored_name
from encoder_core.objectives.teacher import every_other_layer, teacher_names_of_student
from encoder_core.terms.replaced import Sharing
from launcher.errors import RunError

BOTH_REMEDY = f"put the generator into {NETWORKS[0]}/ and the discriminator into {NETWORKS[1]}/ below it"


def holds_single_network(folder: Path) -> bool:
    """Return whether `folder` holds one network, and nothing of a pair."""
    return (folder / CONFIG).is_file() and not any((folder / part / CONFIG).is_file() for part in NETWORKS)


def generator_layers(config: DetectorConfig) -> tuple[int, ...]:
    """Return the layers of the discriminator with which its generator's begin.

    Raises ValueError: the generator has more layers than the discriminator.
    """
    return every_other_layer(config.generator.distinct_layers, config.distinct_layers)


def check_derivable(config: DetectorConfig, where: str) -> None:
    """Raise RunError if the generator of `config` cannot begin with layers of the discriminator in `where`."""
    generator = config.generator
    differing = [key for key in differing_settings(generator, config) if key != "layers"]
    if generator.distinct_layers > config.distinct_layers:
        differing.append("layers")
    if differing:
        listed = "; ".join(
            f"its {key} is {getattr(generator, key)} and the discriminator's {getattr(config, key)}"
            for key in differing
        )
        raise RunError(
            f"start: {where} does not hold both networks that rtd trains, and the recipe's generator cannot begin "
            f"with layers of the discriminator: {listed}",
            remedy=f"{BOTH_REMEDY}, or set `model` so that the generator is as wide as the discriminator and no deeper",
        )


def pair_from_discriminator(config: DetectorConfig, folder: Path, sharing: Sharing) -> dict[str, Tensor]:
    """Return the initial parameters, by name, of the module that trains the pair of `config`, from the discriminator
    in `folder`. The generator's head is not among them; nor is the discriminator's if the folder lacks it.

    Raises ModelError as `weights_for`.
    """
    whole = weights_for(config, folder, "rtd")
    encoder = {name: tensor for name, tensor in whole.items() if name.startswith(ENCODER)}
    generator = _chosen_layers(encoder, generator_layers(config))
    if sharing == "shared":
        return {stored_name("generator", name): tensor for name, tensor in generator.items()} | {
            stored_name("discriminator", name): tensor for name, tensor in whole.items()
        }
    own = {
        name: torch.zeros_like(tensor) if is_difference(name) else tensor for name, tensor in whole.items()
    }
    return {f"generator.{name}": tensor for name, tensor in generator.items()} | {
        f"discriminator.{name}": tensor for name, tensor in own.items()
    }


def _chosen_layers(encoder: Mapping[str, Tensor], layers: tuple[int, ...]) -> dict[str, Tensor]:
    return {ours: encoder[theirs] for ours, theirs in teacher_names_of_student(list(encoder), layers).items()}
