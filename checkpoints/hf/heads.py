"""Which networks of a pair a folder holds, by names of files and parameters. No weight is read, no pickle opened.

A config.json cannot tell: that of DeBERTa v3, a discriminator, has the fields and values of a DeBERTa v2 without
convolution. The head of replaced token detection can, which the published files of version 3 hold next to the other.
Some of them have their generator next to them.
"""

from typing import Any

from checkpoints.hf.folder import (
    CONFIG,
    GENERATOR_CONFIG,
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    WEIGHTS,
    pickled_networks,
)
from checkpoints.hf.headers import stored_shapes
from checkpoints.hf.load import json_object
from data_service.store.base import Store
from encoder_core.families.catalogue import DetectorConfig, interchange

_DETECTION_HEAD = "head.score.weight"
_NAME_BYTES = 4 << 20
"""Bytes at the start of a pickled file that hold all names: torch writes them before the numbers."""


def is_discriminator(store: Store, config: DetectorConfig) -> bool:
    """Return whether the network at the root of `store` has a head that detects replaced tokens; false without weights.

    Pickled weights are not opened: their bytes are searched for the head's name.

    Raises:
        ModelError: the folder's safetensors are damaged.
        StoreError: the store cannot be read.
    """
    their = interchange(config, "rtd")
    name = their.table.names(their.layers)[_DETECTION_HEAD]
    if "." in pickled_networks(store):
        return name.encode() in _pickled_names(store)
    if all(store.size(file) is None for file in (WEIGHTS, INDEX)):
        return False
    return name in their.table.current_names(stored_shapes(store))


def _pickled_names(store: Store) -> bytes:
    """Return bytes that contain the names of the pickled parameters."""
    size = store.size(PICKLE)
    return store.get(PICKLE_INDEX) if size is None else store.get_range(PICKLE, 0, min(size, _NAME_BYTES))


def generator_fields(store: Store) -> dict[str, Any]:
    """Return the fields of the config.json of the generator that lies next to the network at the root of `store`. What
    its file does not say, for instance the type of the model, is as in the discriminator's.

    Raises:
        ModelError: one of the two files is not a JSON object.
        StoreError: the store cannot be read.
    """
    discriminator, own = (
        json_object(store.get(file), f"{store.uri.rstrip('/')}/{file}") for file in (CONFIG, GENERATOR_CONFIG)
    )
    return discriminator | own
