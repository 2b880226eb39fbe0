"""Write a model in the transformers format: model.safetensors, config.json and the tokenizer's files.

The folder is built beside, read back through our own importer and compared bit for bit before anything
appears in the store, config.json last.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.hf.load import CONFIG, WEIGHTS, load_pretrained
from checkpoints.hf.special import special_token_ids
from data_service.store.base import Store
from encoder_core.errors import ModelError
from encoder_core.families.build import ModelConfig
from encoder_core.families.hf.interchange import Heads, Interchange, interchange


def export_model(
    read_parameter: Callable[[str], Tensor],
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    out: Store,
    heads: Heads = "mlm",
) -> None:
    """Export to the root of `out`, in fp32.

    `read_parameter` gives a parameter by our name, whole. Raises ModelError if what was written does not read
    back as the same bits, StoreError kinds if `out` cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="maskfleet-export-") as name:
        folder = Path(name)
        _write_folder(folder, read_parameter, interchange(config, heads), tokenizer_files)
        _compare(folder, read_parameter, heads)
        files = sorted(path for path in folder.iterdir() if path.name != CONFIG)
        for path in [*files, folder / CONFIG]:
            out.put_file(path.name, path)


def _write_folder(
    folder: Path,
    read_parameter: Callable[[str], Tensor],
    their: Interchange,
    tokenizer_files: Mapping[str, bytes],
) -> None:
    for name, content in tokenizer_files.items():
        (folder / name).write_bytes(content)
    tensors = {
        theirs: read_parameter(ours).to(torch.float32).contiguous()
        for ours, theirs in their.table.names(their.layers).items()
    }
    for fold in their.table.folds:
        tensors[fold.theirs] = torch.zeros_like(read_parameter(fold.ours)[:1])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    fields = their.fields | {"dtype": "float32"} | special_token_ids(tokenizer_files)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _compare(folder: Path, read_parameter: Callable[[str], Tensor], heads: Heads) -> None:
    for name, read_back in load_pretrained(folder, heads).tensors.items():
        written = read_parameter(name).to(torch.float32)
        if not torch.equal(read_back.view(torch.int32), written.contiguous().view(torch.int32)):
            raise ModelError(
                f"{name} does not read back from the export as it was written",
                remedy="check the disk that holds the temporary folder, and export again",
            )
