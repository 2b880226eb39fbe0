"""Read a folder in the transformers format. Only safetensors: a pickle is never opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoints.hf.folder import CONFIG, INDEX, WEIGHTS
from data_service.formats import foreign_json
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig, interchange, read_config
from encoder_core.families.interchange import Heads, KeyTable
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.compose import network


@dataclass(frozen=True)
class Pretrained:
    """A model from outside: our configuration of it, and its parameters by our names, on the CPU.

    They are fp32, but for sums of two (`Fold`), which are fp64. Rounded to fp32, these are the sums that fp32 gives.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]


def load_pretrained(folder: Path, heads: Heads = "mlm") -> Pretrained:
    """The encoder and the asked heads of the model in `folder`; other heads there are left alone.

    Raises ModelError: no such folder, no safetensors, a model type that we do not have, parameters missing,
    unknown or of another shape than config.json says.
    """
    config = read_folder_config(folder)
    their = interchange(config, heads)
    stored = _stored_names(folder)
    matched = their.table.match(stored, their.layers, str(folder))
    return Pretrained(config, _read(folder, config, heads, stored, matched))


def weights_for(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> dict[str, Tensor]:
    """The parameters in `folder` to start a model of `config` from, by our names: the encoder whole, and those of the
    asked heads that are there.

    Raises ModelError, as `load_pretrained`, and where the folder's model has another shape than `config`.
    """
    check_same_model(config, read_folder_config(folder), str(folder))
    their = interchange(config, heads)
    stored = _stored_names(folder)
    matched = their.table.match_encoder(stored, their.layers, str(folder))
    return _read(folder, config, heads, stored, matched)


def unused_in(config: ModelConfig, folder: Path, heads: Heads = "mlm") -> list[str]:
    """Stored names of the parameters in `folder` that `weights_for` has no place for: heads of other tasks."""
    their = interchange(config, heads)
    table, present = their.table, their.table.modern(_stored_names(folder))
    used = {*table.names(their.layers).values(), *table.tied, *(fold.theirs for fold in table.folds)}
    return sorted(name for name in present if name not in used and not name.endswith("_ids"))


# What parameters do not depend on. RoBERTa's padding id is not among them: its positions begin after it.
_FREE = {
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
    "reuse",
}


def check_same_model(config: ModelConfig, found: ModelConfig, where: str) -> None:
    """Raises ModelError unless the model `found` in `where` is `config`'s, apart from what weights do not depend on."""
    ours, theirs = _shape(config), _shape(found)
    differing = [key for key in ours if ours[key] != theirs.get(key)]
    if differing:
        listed = "; ".join(f"{key} is {ours[key]} here and {theirs.get(key)} there" for key in differing)
        raise ModelError(
            f"the model in {where} is not the recipe's model: {listed}",
            remedy="set the recipe's `model` to the values there (vocab comes from `tokenizer`; phases may be shorter "
            "than max_length), or start from scratch",
        )


def _shape(config: ModelConfig) -> dict[str, object]:
    free = _FREE | (set() if config.counts_from_padding else {"pad_id"})
    return config.model_dump(exclude=free | ({"max_length"} if not config.bounded else set()))


def read_folder_config(folder: Path) -> ModelConfig:
    """Our configuration of the model in `folder`. Raises ModelError: no such folder, or a model that we do not have."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist",
            remedy="give a folder that `save_pretrained` or `maskfleet checkpoints export` wrote",
        )
    try:
        return read_config(_read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path} does not describe a model: {error}", remedy="correct that file") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = foreign_json(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", remedy="fetch the file again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} is not a JSON object", remedy="fetch the file again")
    return fields


def _stored_names(folder: Path) -> dict[str, str]:
    """Their parameter names to the file that holds each."""
    if (folder / INDEX).is_file():
        files = _indexed(folder / INDEX)
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        raise ModelError(
            f"{folder} has no {WEIGHTS}",
            remedy="convert other weights first: load them with transformers where you trust them, then "
            "save_pretrained(folder); pickled weights are not opened here",
        )
    return {name: file for file in files for name in _open(folder, file).keys()}  # noqa: SIM118


def _indexed(path: Path) -> list[str]:
    """The files that an index names."""
    weight_map = _read_json(path).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    names = {file for file in files if isinstance(file, str)}
    if not all(isinstance(file, str) for file in files):
        raise ModelError(f"{path} is not an index of weights", remedy="fetch the file again")
    return sorted(names)


def _open(folder: Path, file: str) -> Any:
    """A safetensors file of the folder, opened by mapping it into memory."""
    path = folder / file
    if Path(file).name != file or not path.is_file():
        raise ModelError(f"{path} does not exist", remedy="fetch the missing file into the folder")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged: {error}", remedy="fetch the file again") from error


def _read(
    folder: Path, config: ModelConfig, heads: Heads, stored: dict[str, str], matched: dict[str, str]
) -> dict[str, Tensor]:
    tensors = _read_all(folder, stored, matched, interchange(config, heads).table)
    with on_meta():
        model = network(config, heads)
    _check_shapes(folder, model, tensors)
    return tensors


def _read_all(
    folder: Path, stored: dict[str, str], matched: dict[str, str], table: KeyTable
) -> dict[str, Tensor]:
    files = {file: _open(folder, file) for file in set(stored.values())}

    def read(name: str) -> Tensor:
        tensor: Tensor = files[stored[name]].get_tensor(name)
        return tensor.to(torch.float32)

    tensors = {ours: read(theirs) for ours, theirs in matched.items()}
    present = table.modern(stored)
    for fold in table.folds:
        if fold.theirs in present:
            row = read(present[fold.theirs])[0]
            if row.any():  # the sums of fp32 numbers are fp64, so that a model in fp64 has them exactly
                tensors[fold.ours] = tensors[fold.ours].double() + row.double()
    return tensors


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
