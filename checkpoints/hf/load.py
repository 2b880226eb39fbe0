"""Reads models in the transformers format. Only safetensors files are opened, never a pickle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoints.hf.folder import CONFIG, INDEX, WEIGHTS
from data_service.formats import parse_json
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import Interchange, ModelConfig, interchange, read_config
from encoder_core.families.interchange import Heads
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.compose import network


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a folder.

    Attributes:
        config: our configuration of the model.
        tensors: parameters by our names, on the CPU. They are fp32, except sums of two stored parameters (`Fold`),
            which are fp64. Rounded to fp32, such a sum equals the sum computed in fp32.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]


def load_pretrained(folder: Path, heads: Heads = "mlm") -> Pretrained:
    """Return the encoder and the heads `heads` of the model in `folder`. Other heads there are not read.

    Raises ModelError: the folder does not exist or has no safetensors; its model type is unknown to us; a parameter is
    missing, unknown, or of another shape than config.json says; or copies of a tied parameter differ.
    """
    config = read_folder_config(folder)
    their = interchange(config, heads)
    stored = _files_by_parameter(folder)
    matched = their.table.match(stored, their.layers, str(folder))
    return Pretrained(config, _read_checked(folder, config, heads, stored, matched))


def weights_for(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> dict[str, Tensor]:
    """Return initial parameters for a model of `config` from `folder`, by our names.

    They are the whole encoder and those parameters of the heads `heads` that the folder holds.

    Raises ModelError as `load_pretrained`, and if the folder's model has another shape than `config`.
    """
    check_same_model(config, read_folder_config(folder), str(folder))
    their = interchange(config, heads)
    stored = _files_by_parameter(folder)
    matched = their.table.match_encoder(stored, their.layers, str(folder))
    return _read_checked(folder, config, heads, stored, matched)


def unused_parameters(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> list[str]:
    """Return the stored names of the parameters in `folder` that `weights_for` does not read: heads of other tasks."""
    their = interchange(config, heads)
    table, present = their.table, their.table.current_names(_files_by_parameter(folder))
    used = {*table.names(their.layers).values(), *table.tied, *(fold.theirs for fold in table.folds)}
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
    return config_from_fields(json_object(path.read_bytes(), str(path)), str(path))


def config_from_fields(fields: dict[str, Any], where: str) -> ModelConfig:
    """Return our configuration of the model that the fields of a config.json describe. Raises ModelError, which names
    `where`: its model is unknown to us."""
    try:
        return read_config(fields)
    except ValidationError as error:
        text = "; ".join(
            f"{'.'.join(map(str, its['loc'])) or 'it'} is {its['input']!r:.80}: {its['msg']}"
            for its in error.errors()
        )
        raise ModelError(f"{where} does not describe a model: {text}", remedy="correct this file") from error


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the fields of the JSON object in `data`. Raises ModelError, which names `where`: it is
    no JSON object."""
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}", remedy="download the file again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{where} is not a JSON object", remedy="download the file again")
    return fields


def _files_by_parameter(folder: Path) -> dict[str, str]:
    """Return the name of the file that holds each parameter, by the parameter's stored name."""
    if (folder / INDEX).is_file():
        files = _indexed_files(folder / INDEX)
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        raise ModelError(
            f"{folder} has no {WEIGHTS}",
            remedy="convert other weights first: if you trust them, load them with transformers and call "
            "save_pretrained(folder); pickled weights are opened only by `maskfleet init`, for `start:`",
        )
    return {name: file for file in files for name in _open_safetensors(folder, file).keys()}  # noqa: SIM118


def _indexed_files(path: Path) -> list[str]:
    """Return the files that an index names."""
    weight_map = json_object(path.read_bytes(), str(path)).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    names = {file for file in files if isinstance(file, str)}
    if not all(isinstance(file, str) for file in files):
        raise ModelError(f"{path} is not an index of weights", remedy="download the file again")
    return sorted(names)


def _open_safetensors(folder: Path, file: str) -> Any:
    """Return a safetensors file of the folder, opened by mapping it into memory."""
    path = folder / file
    if Path(file).name != file or not path.is_file():
        raise ModelError(f"{path} does not exist", remedy="download the missing file into the folder")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {error}", remedy="download the file again") from error


def _read_checked(
    folder: Path, config: ModelConfig, heads: Heads, stored: dict[str, str], matched: dict[str, str]
) -> dict[str, Tensor]:
    tensors = _read_tensors(folder, stored, matched, interchange(config, heads))
    with on_meta():
        model = network(config, heads)
    _check_shapes(folder, model, tensors)
    return tensors


def _read_tensors(
    folder: Path, stored: dict[str, str], matched: dict[str, str], their: Interchange
) -> dict[str, Tensor]:
    table = their.table
    files = {file: _open_safetensors(folder, file) for file in set(stored.values())}

    def read(name: str) -> Tensor:
        tensor: Tensor = files[stored[name]].get_tensor(name)
        return tensor.to(torch.float32)

    tensors = table.unpack(read, matched, their.layers)
    present = table.current_names(stored)
    for ours, theirs in matched.items():
        for copy in table.copies(ours):
            if copy in present and not torch.equal(read(present[copy]), tensors[ours]):
                raise _differing_copies_error(folder, theirs, present[copy])
    for name in table.zero:
        if name in present and read(present[name]).any():
            raise ModelError(
                f"{folder}: {name} is not zero, and the model has no such tensor",
                remedy="use weights that were trained without it, as the published ones were",
            )
    for fold in table.folds:
        if fold.theirs in present:
            row = read(present[fold.theirs])[0]
            if row.any():  # added in fp64, so that an fp64 model gets the exact sums of fp32 numbers
                tensors[fold.ours] = tensors[fold.ours].double() + row.double()
    return tensors


def _differing_copies_error(folder: Path, name: str, copy: str) -> ModelError:
    return ModelError(
        f"{folder}: {name} and {copy} differ, and the model has one parameter for both",
        remedy=f"use weights in which they are equal. transformers 5 computes with either, each in its place; "
        f"transformers 4 used {name} for both: to do so, too, save the weights without {copy}",
    )


def _check_shapes(folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if wrong:
        raise ModelError(
            f"{folder}: the weights do not fit its {CONFIG}: {'; '.join(wrong)}",
            remedy="use the configuration and the weights of one and the same model",
        )
