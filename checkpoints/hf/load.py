"""Reads models in the transformers format. Only safetensors files are opened, never a pickle.

The names of files and parameters show whether a folder holds a generator or a discriminator; config.json does not:
DeBERTa v3 (a discriminator) and DeBERTa v2 without convolution have the same fields and values. The published folders
of version 3 also hold the head of replaced-token detection, and some of them the generator.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoints.hf.folder import CONFIG, GENERATOR_CONFIG, INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, pickled_networks
from checkpoints.hf.headers import require_equal_shapes, stored_shapes, stored_shapes_by_file
from data_service.formats import parse_json
from data_service.store.base import Store
from data_service.store.local import LocalStore
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import HfFormat, ModelConfig, hf_format_of, read_config
from encoder_core.families.interchange import Heads
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.modules.network import build_network


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a folder: its parameters by our names, on the CPU.

    They are fp32, except sums of two stored parameters (`FoldedTable`), which are fp64. Rounded to fp32, such a sum
    equals the sum computed in fp32.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]


def load_pretrained(folder: Path, heads: Heads = "mlm") -> Pretrained:
    """Return the encoder and the heads `heads` of the model in `folder`. Other heads there are not read.

    Raises ModelError: the folder does not exist or has no safetensors; its model type is unknown to us; a parameter is
    missing, unknown, or of another shape than config.json says; or copies of a tied parameter differ.
    """
    config = read_folder_config(folder)
    their = hf_format_of(config, heads)
    stored = _files_by_parameter(folder)
    matched = their.table.match(stored, their.layers, str(folder))
    return Pretrained(config, _read_checked_tensors(folder, config, heads, stored, matched))


def weights_for(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> dict[str, Tensor]:
    """Return initial parameters for a model of `config` from `folder`, by our names.

    They are the whole encoder and those parameters of the heads `heads` that the folder holds.

    Raises ModelError as `load_pretrained` and `check_same_model`: the folder's model may be another than `config`'s.
    """
    check_same_model(config, read_folder_config(folder), str(folder))
    their = hf_format_of(config, heads)
    stored = _files_by_parameter(folder)
    matched = their.table.match(stored, their.layers, str(folder), any_heads=True)
    return _read_checked_tensors(folder, config, heads, stored, matched)


def unused_parameters(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> list[str]:
    """Return the stored names of the parameters in `folder` that `weights_for` does not read: heads of other tasks."""
    their = hf_format_of(config, heads)
    table, present = their.table, their.table.current_names(_files_by_parameter(folder))
    used = {*table.their_names(their.layers).values(), *table.tied, *(fold.theirs for fold in table.folds)}
    return sorted(name for name in present if name not in used and not name.endswith("_ids"))


# Settings on which parameters do not depend. RoBERTa's padding id is not among them: its positions begin after it.
_SETTINGS_WITHOUT_WEIGHTS = {
    "dropout",
    "attention_dropout",
    "attention_output_dropout",
    "generator_divisor",
    "generator_layers",
    "initializer",
    "initializer_range",
    "mask_decoder",
    "memory",
    "memory_refresh",
    "mup",
    "reuse",
}


def check_same_model(config: ModelConfig, found: ModelConfig, where: str) -> None:
    """Raise ModelError if the model `found` in `where` differs from `config` in a setting on which weights depend."""
    differing = differing_settings(config, found)
    if differing:
        ours, theirs = config.model_dump(), found.model_dump()
        listed = "; ".join(f"{key} is {ours.get(key)} here and {theirs.get(key)} there" for key in differing)
        raise ModelError(
            f"the model in {where} is not the recipe's model: {listed}",
            remedy="set the recipe's `model` to the values of that model (vocab comes from `tokenizer`; phases may be "
            "shorter than max_length), or train from scratch",
        )


def differing_settings(config: ModelConfig, found: ModelConfig) -> list[str]:
    """Return the keys of those settings on which weights depend and in which `config` and `found` differ."""
    ours, theirs = _weight_settings(config), _weight_settings(found)
    return [key for key in ours | theirs if ours.get(key) != theirs.get(key)]


def _weight_settings(config: ModelConfig) -> dict[str, object]:
    free = _SETTINGS_WITHOUT_WEIGHTS | (set() if config.offsets_positions_by_padding else {"pad_id"})
    return config.model_dump(exclude=free | ({"max_length"} if not config.has_length_limit else set()))


def read_folder_config(folder: Path) -> ModelConfig:
    """Return our configuration of the model in `folder`.

    Raises ModelError: the folder has no configuration, or its model is unknown to us.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist",
            remedy="give a folder that `save_pretrained` or `maskfleet checkpoints export` has written",
        )
    return config_from_fields(parse_json_object(path.read_bytes(), str(path)), str(path))


def config_from_fields(fields: dict[str, Any], where: str) -> ModelConfig:
    """Return our configuration of the model that the fields of a config.json describe. Raises ModelError, which names
    `where`: its model is unknown to us."""
    try:
        return read_config(fields)
    except ValidationError as error:
        text = "; ".join(
            f"{'.'.join(map(str, its['loc'])) or 'it'} is {its['input']!r:.80}: {its['msg']}" for its in error.errors()
        )
        raise ModelError(f"{where} does not describe a model: {text}", remedy="correct this file") from error


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the fields of the JSON object in `data`. Raises ModelError, which names `where`: it is no JSON object."""
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}", remedy="download the file again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{where} is not a JSON object", remedy="download the file again")
    return fields


def _files_by_parameter(folder: Path) -> dict[str, str]:
    return {
        name: file for file, shapes in stored_shapes_by_file(LocalStore(folder.absolute())).items() for name in shapes
    }


def _open_safetensors(folder: Path, file: str) -> Any:
    try:
        return safe_open(folder / file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{folder / file} is damaged: {error}", remedy="download the file again") from error


def _read_checked_tensors(
    folder: Path, config: ModelConfig, heads: Heads, stored: dict[str, str], matched: dict[str, str]
) -> dict[str, Tensor]:
    tensors = _read_tensors(folder, stored, matched, hf_format_of(config, heads))
    with on_meta():
        expected = {name: tuple(its.shape) for name, its in build_network(config, heads).named_parameters()}
    found = ((name, tuple(tensor.shape), expected[name]) for name, tensor in tensors.items() if name in expected)
    require_equal_shapes(found, str(folder))
    return tensors


def _read_tensors(
    folder: Path, stored: dict[str, str], matched: dict[str, str], hf_format: HfFormat
) -> dict[str, Tensor]:
    """Read the parameters in `matched`, by our names. Raises ModelError if the stored tensors are inconsistent."""
    table = hf_format.table
    files = {file: _open_safetensors(folder, file) for file in set(stored.values())}

    def read_fp32(name: str) -> Tensor:
        tensor: Tensor = files[stored[name]].get_tensor(name)
        return tensor.to(torch.float32)

    tensors = table.unpack(read_fp32, matched, hf_format.layers)
    present = table.current_names(stored)
    for ours, theirs in matched.items():
        for copy in table.tied_copies(ours):
            if copy in present and not torch.equal(read_fp32(present[copy]), tensors[ours]):
                raise _differing_copies_error(folder, theirs, present[copy])
    for name in table.zero:
        if name in present and read_fp32(present[name]).any():
            raise ModelError(
                f"{folder}: {name} is not zero, and the model has no such tensor",
                remedy="use weights that were trained without this tensor, as the published ones were",
            )
    for fold in table.folds:
        if fold.theirs in present:
            row = read_fp32(present[fold.theirs])[0]
            if row.any():  # summed in fp64, so that an fp64 model gets the exact sums of the fp32 numbers
                tensors[fold.ours] = tensors[fold.ours].double() + row.double()
    return tensors


def _differing_copies_error(folder: Path, name: str, copy: str) -> ModelError:
    return ModelError(
        f"{folder}: {name} and {copy} differ, and the model has one parameter for both",
        remedy=f"use weights in which both are equal. transformers 5 uses each of them in its own place; "
        f"transformers 4 used {name} for both: to do the same, save the weights without {copy}",
    )


_DETECTION_HEAD = "head.score.weight"  # our name of a parameter that only a discriminator has
_SEARCHED_BYTES = 4 << 20
"""Bytes at the start of a pickled file that hold all names: torch writes them before the numbers."""


def is_discriminator(store: Store, config: ModelConfig) -> bool:
    """Return whether the network at the root of `store` has a head that detects replaced tokens; false without weights.

    Pickled weights are not opened: their bytes are searched for the head's name.

    Raises:
        ModelError: the folder's safetensors are damaged.
        StoreError: the store cannot be read.
    """
    their = hf_format_of(config, "rtd")
    name = their.table.their_names(their.layers)[_DETECTION_HEAD]
    if "." in pickled_networks(store):
        return name.encode() in _bytes_with_names(store)
    if all(store.size(file) is None for file in (WEIGHTS, INDEX)):
        return False
    return name in their.table.current_names(stored_shapes(store))


def _bytes_with_names(store: Store) -> bytes:
    """Return the part of the pickled weights, or of their index, that holds the parameters' names."""
    size = store.size(PICKLE)
    return store.get(PICKLE_INDEX) if size is None else store.get_range(PICKLE, 0, min(size, _SEARCHED_BYTES))


def generator_fields(store: Store) -> dict[str, Any]:
    """Return the configuration fields of the generator that lies next to the network at the root of `store`. Fields
    that its file lacks, for instance the model's type, are taken from the discriminator's config.json.

    Raises:
        ModelError: one of the two files is not a JSON object.
        StoreError: the store cannot be read.
    """
    discriminator, own = (
        parse_json_object(store.get(file), f"{store.uri.rstrip('/')}/{file}") for file in (CONFIG, GENERATOR_CONFIG)
    )
    return discriminator | own
