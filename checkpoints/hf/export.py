"""Writes models in the transformers format: model.safetensors, config.json, the tokenizer's files and a model card.

The folder is built in a temporary place, read back through our own importer and compared bit for bit. Then it is
published as a whole (`checkpoints.hf.folder`).

A generator and a discriminator (ELECTRA, DeBERTa v3) have a folder each. Embeddings that both share are written into
both. If the embeddings are gradient-disentangled, the discriminator's folder holds the sum that the discriminator uses,
E_G + E_delta. When the pair is read back, E_delta is computed as the difference from E_G, up to rounding.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.hf.folder import CONFIG, WEIGHTS, publish, replaceable_files
from checkpoints.hf.load import load_pretrained, weights_for
from data_service.processes import temporary_folder
from data_service.store.base import Store
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import HfFormat, ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.objectives.modules.detection import Part, is_embedding_difference, shared_parameter_name
from encoder_core.objectives.replaced import Sharing

ReadParameter = Callable[[str], Tensor]
"""A function that returns a whole parameter by our name for it."""
_TOKENIZER_CONFIG, _TOKENIZER_JSON = "tokenizer_config.json", "tokenizer.json"
_TOKEN_ROLES = {
    "bos_token_id": ("bos_token", "cls_token"),
    "eos_token_id": ("eos_token", "sep_token"),
    **{f"{role}_token_id": (f"{role}_token",) for role in ("cls", "sep", "mask")},
}
"""Fields of config.json, and the tokens whose ids they hold. Without a field, some classes of transformers take the
published model's id."""
MODEL_CARD = "README.md"
_NO_NOTES: Mapping[str, str] = MappingProxyType({})  # no further files


def adapt_tokenizer_files(tokenizer_files: Mapping[str, bytes], config: ModelConfig) -> dict[str, bytes]:
    """Return a tokenizer's files, with `tokenizer_config.json` adapted to the model of `config`.

    - `model_max_length` is the model's longest row. Tools cannot derive it from the size of the position table, because
      RoBERTa's table has extra rows before the first position.
    - XLNet's rows are padded on the left: its class token is the last one, and transformers classifies by the last
      position.
    - Models without token types must not be given any: ModernBERT refuses them, XLM interprets them as words.
    """
    files = dict(tokenizer_files)
    if _TOKENIZER_CONFIG in files:
        fields = json.loads(files[_TOKENIZER_CONFIG]) | {"model_max_length": config.max_length}
        if config.class_token_last:
            fields["padding_side"] = "left"
        if not config.takes_token_types and (config.segment_count or 0) < 2:
            fields["model_input_names"] = ["input_ids", "attention_mask"]
        files[_TOKENIZER_CONFIG] = (json.dumps(fields, ensure_ascii=False, indent=2) + "\n").encode()
    return files


def special_token_ids(tokenizer_files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the ids of special tokens for config.json: names from tokenizer_config.json, ids from tokenizer.json.

    An id that the files do not give is left out. The padding id is among the model's own fields.
    """
    if not {_TOKENIZER_JSON, _TOKENIZER_CONFIG} <= set(tokenizer_files):
        return {}
    configured = json.loads(tokenizer_files[_TOKENIZER_CONFIG])
    added = json.loads(tokenizer_files[_TOKENIZER_JSON]).get("added_tokens", [])
    ids = {token["content"]: int(token["id"]) for token in added}
    found = {field: _first_configured_token(configured, roles) for field, roles in _TOKEN_ROLES.items()}
    return {field: ids[name] for field, name in found.items() if name in ids}


def _token_id_fields(config: ModelConfig, tokenizer_files: Mapping[str, bytes]) -> dict[str, int]:
    """Return the special token ids for config.json. A decoder's text begins and ends with the end-of-row token."""
    ids = special_token_ids(tokenizer_files)
    if config.has_decoder and "eos_token_id" in ids:
        ids |= dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id"), ids["eos_token_id"])
    return ids


def _first_configured_token(configured: dict[str, Any], roles: tuple[str, ...]) -> str | None:
    """Return the token of the first of the `roles` that tokenizer_config.json assigns; None if it assigns none."""
    for role in roles:
        token = configured.get(role)
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


@contextmanager
def publish_on_exit(out: Store) -> Iterator[Path]:
    """Yield a local folder whose files are written to `out` at the end of the block, unless it raises. They replace the
    files of an earlier export.

    Raises:
        ExportError: `out` holds files that no export wrote, or that were changed since.
        StoreError: `out` cannot be written.
    """
    former = replaceable_files(out)
    with temporary_folder("export") as name:
        yield name
        publish(name, out, former)


def write_model(
    folder: Path,
    read_parameter: ReadParameter,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    heads: Heads,
    *,
    notes: Mapping[str, str] = _NO_NOTES,
) -> None:
    """Write one network's files into the local `folder`, in fp32, read them back and compare.

    `tokenizer_files`, `notes`: contents of the tokenizer's and of further files, by name.

    Raises ModelError: the parameters that were read back differ from those that were written.
    """
    folder.mkdir(exist_ok=True)
    their = hf_format_of(config, heads)
    for name, content in adapt_tokenizer_files(tokenizer_files, config).items():
        (folder / name).write_bytes(content)
    for name, text in notes.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_weights(folder, read_parameter, their)
    fields = their.fields | {"dtype": "float32"} | _token_id_fields(config, tokenizer_files)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    _compare_weights(folder, read_parameter, heads)


def _write_weights(folder: Path, read_parameter: ReadParameter, hf_format: HfFormat) -> None:
    def read_fp32(name: str) -> Tensor:
        return read_parameter(name).to(torch.float32).contiguous()

    tensors = hf_format.table.pack(read_fp32, hf_format.layers)
    for fold in hf_format.table.folds:  # tables of transformers that ours include: zeros are written
        tensors[fold.theirs] = torch.zeros_like(read_parameter(fold.ours)[:1])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _compare_weights(folder: Path, read_parameter: ReadParameter, heads: Heads) -> None:
    for name, read_back in load_pretrained(folder, heads).tensors.items():
        written = read_parameter(name).to(torch.float32)
        if not torch.equal(read_back.view(torch.int32), written.contiguous().view(torch.int32)):
            raise ModelError(
                f"{name}: the values read back from the export differ from those that were written",
                remedy="check the disk that holds the temporary folder, and export again",
            )


def write_network_pair(
    folder: Path,
    read_parameter: ReadParameter,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    sharing: Sharing,
    *,
    notes: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Write the files of both networks into `generator/` and `discriminator/` below the local `folder`.

    Arguments and errors as for `write_model`, except:

    Args:
        read_parameter: function that returns a whole parameter by its name in the module that trains both networks.
        config: configuration of the discriminator, which holds the generator's.
        notes: further files of each network, by its folder's name.
    """
    notes = notes or {}
    networks: dict[Part, tuple[ModelConfig, Heads]] = {
        "generator": (config.generator, "mlm"),
        "discriminator": (config, "rtd"),
    }
    for part, (network, heads) in networks.items():
        read = _part_reader(read_parameter, part, sharing)
        write_model(folder / part, read, network, tokenizer_files, heads, notes=notes.get(part, _NO_NOTES))


def _part_reader(read_parameter: ReadParameter, part: Part, sharing: Sharing) -> ReadParameter:
    """Return a function that reads one network's parameters by its own names, as it needs them outside the pair."""

    def read_network_parameter(name: str) -> Tensor:
        if sharing == "shared":
            return read_parameter(shared_parameter_name(part, name))
        if part == "discriminator" and is_embedding_difference(name):
            return read_parameter(f"generator.{name}") + read_parameter(f"discriminator.{name}")
        return read_parameter(f"{part}.{name}")

    return read_network_parameter


def pair_weights_for(config: ModelConfig, folder: Path, sharing: Sharing = "shared") -> dict[str, Tensor]:
    """Return the initial parameters of the module that trains a pair, read from `generator/` and `discriminator/`.

    Raises ModelError as `weights_for`, and if `sharing` is "shared" but the networks' embeddings differ.
    """
    generator = weights_for(config.generator, folder / "generator", "mlm")
    discriminator = weights_for(config, folder / "discriminator", "rtd")
    if sharing == "shared":
        _check_embeddings(generator, discriminator, folder)
    return join_pair_weights(generator, discriminator, sharing)


def join_pair_weights(
    generator: Mapping[str, Tensor], discriminator: Mapping[str, Tensor], sharing: Sharing
) -> dict[str, Tensor]:
    """Return the parameters of the module that trains a pair, by name, from those of its two networks."""
    if sharing == "shared":
        return {shared_parameter_name("generator", name): tensor for name, tensor in generator.items()} | {
            shared_parameter_name("discriminator", name): tensor for name, tensor in discriminator.items()
        }
    own = {
        name: tensor - generator[name] if is_embedding_difference(name) else tensor
        for name, tensor in discriminator.items()
    }
    return {f"generator.{name}": tensor for name, tensor in generator.items()} | {
        f"discriminator.{name}": tensor for name, tensor in own.items()
    }


def _check_embeddings(generator: dict[str, Tensor], discriminator: dict[str, Tensor], folder: Path) -> None:
    differing = [
        name
        for name, tensor in sorted(generator.items())
        if name.startswith("encoder.embeddings.") and not torch.equal(tensor, discriminator[name])
    ]
    if differing:
        raise ModelError(
            f"the networks in {folder} do not share their embeddings: {', '.join(differing)} differ",
            remedy="use a generator and a discriminator that were trained together with shared embeddings, or set "
            "objective.rtd.embeddings: gradient_disentangled",
        )
