"""Names and shapes of the parameters in a folder's safetensors, read from the files' headers. No weight is read.

So a `start:` that cannot work is refused before ranks start, even if the files are large and in a bucket. Later the
ranks read the weights with `checkpoints.hf.load`, which looks at the headers first, too.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from checkpoints.hf.folder import CONFIG, INDEX, WEIGHTS
from data_service.formats import parse_json
from data_service.store.base import Store
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.modules.network import build_network

Shape = tuple[int, ...]

_LENGTH_BYTES = 8  # bytes of the field at the start of the file that holds the header's length
_MAX_HEADER_BYTES = 100_000_000  # bytes of the longest header that the safetensors library accepts


class _TensorHeader(BaseModel):
    model_config = ConfigDict(strict=True)

    shape: list[NonNegativeInt]
    data_offsets: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


_HEADER_TYPE = TypeAdapter(dict[str, _TensorHeader])  # header of a safetensors file, by parameter
_INDEX_TYPE = TypeAdapter(dict[str, str])  # `weight_map` of an index: the file of each parameter


def check_weights(config: ModelConfig, store: Store, heads: Heads) -> None:
    """Check that the folder at the root of `store` holds the whole encoder of `config`, in the right shapes.

    Raises:
        ModelError: the folder has no safetensors; a file is missing or truncated; or a parameter is missing, unknown
            or of another shape.
        StoreError: the store cannot be read.
    """
    stored = stored_shapes(store)
    their = hf_format_of(config, heads)
    matched = their.table.match(stored, their.layers, store.uri, any_heads=True)
    with on_meta():
        shapes = {name: tuple(parameter.shape) for name, parameter in build_network(config, heads).named_parameters()}
    shapes |= {name: (rows, *shapes[name][1:]) for name, rows in their.table.heights(their.layers).items()}
    pairs = [(matched[name], stored[matched[name]], shape) for name, shape in shapes.items() if name in matched]
    require_equal_shapes(pairs, store.uri)


def require_equal_shapes(tensors: Iterable[tuple[str, Shape, Shape]], where: str) -> None:
    """Raise ModelError if shapes differ. `tensors`: name, found shape and expected shape of each tensor."""
    wrong = dict.fromkeys(f"{name} is {found}, not {shape}" for name, found, shape in tensors if found != shape)
    if wrong:
        raise ModelError(
            f"{where}: the weights do not fit its {CONFIG}: {'; '.join(wrong)}",
            remedy="use the configuration and the weights of one and the same model",
        )


def stored_shapes(store: Store) -> dict[str, Shape]:
    """Return the shape of every parameter in the folder, by its stored name. Raises as `check_weights`."""
    return {name: shape for shapes in stored_shapes_by_file(store).values() for name, shape in shapes.items()}


def stored_shapes_by_file(store: Store) -> dict[str, dict[str, Shape]]:
    """Return the shape of every parameter, by its file and its stored name. Raises as `check_weights`."""
    if store.size(INDEX) is not None:
        files = sorted(set(_read_index(store).values()))
    elif store.size(WEIGHTS) is not None:
        files = [WEIGHTS]
    else:
        raise ModelError(
            f"{store.uri} has no {WEIGHTS}",
            remedy="convert other weights first: if you trust them, load them with transformers and call "
            "save_pretrained(folder); pickled weights are opened only by `maskfleet init`, for `start:`",
        )
    return {file: _read_shapes(store, file) for file in files}


def _read_index(store: Store) -> Mapping[str, str]:
    try:
        content = parse_json(store.get(INDEX))
        return _INDEX_TYPE.validate_python(content.get("weight_map") if isinstance(content, dict) else None)
    except (ValueError, ValidationError) as error:
        raise ModelError(f"{store.uri}/{INDEX} is not an index of weights", remedy="download the file again") from error


def _read_shapes(store: Store, file: str) -> dict[str, Shape]:
    place = f"{store.uri.rstrip('/')}/{file}"
    size = store.size(file) if PurePosixPath(file).name == file else None
    if size is None:
        raise ModelError(f"{place} does not exist", remedy="download the missing file into the folder")
    length = int.from_bytes(store.get_range(file, 0, _LENGTH_BYTES), "little") if size > _LENGTH_BYTES else 0
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ModelError(
            f"{place} is truncated or is not a safetensors file ({size:,} bytes)",
            remedy="download the file again",
        )
    try:
        header = parse_json(store.get_range(file, _LENGTH_BYTES, length))
        header.pop("__metadata__", None)
        entries = _HEADER_TYPE.validate_python(header)
    except (ValueError, AttributeError, ValidationError) as error:
        raise ModelError(f"{place} is damaged: its header cannot be read", remedy="download the file again") from error
    expected = _LENGTH_BYTES + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != expected:
        raise ModelError(
            f"{place} is truncated or damaged: it has {size:,} bytes, but its header says {expected:,}",
            remedy="download the file again",
        )
    return {name: tuple(entry.shape) for name, entry in entries.items()}
