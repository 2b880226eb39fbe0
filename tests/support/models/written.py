"""Models in the transformers format, written straight into a store."""

from collections.abc import Mapping

from checkpoints.hf.export import ReadParameter, publish_on_exit, write_model, write_network_pair
from data_service.store.base import Store
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.objectives.replaced import Sharing


def export_model(
    read_parameter: ReadParameter,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    out: Store,
    heads: Heads = "mlm",
) -> None:
    """Export a model to the root of `out`; see `write_model`."""
    with publish_on_exit(out) as folder:
        write_model(folder, read_parameter, config, tokenizer_files, heads)


def export_pair(
    read_parameter: ReadParameter,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    out: Store,
    sharing: Sharing = "shared",
) -> None:
    """Export a pair of networks to two folders of `out`, both or none; see `write_network_pair`."""
    with publish_on_exit(out) as folder:
        write_network_pair(folder, read_parameter, config, tokenizer_files, sharing)
