"""Adds a network's ONNX graph to its exported folder, where servers look for it: `onnx/model.onnx`.

torch's exporter traces transformers' class, for any number of rows and tokens. The graph is kept only if it computes
what our PyTorch model computes (`parity.py`). An int8 graph is made by onnxruntime's dynamic quantization: matrices and
embedding tables are stored in 8 bits, and activations are quantized when the graph runs.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoints.hf.export import MODEL_CARD
from checkpoints.hf.load import read_folder_config
from encoder_core.errors import ModelError
from launcher.after.onnx.network import ONNX_EXTRA, ONNX_PURPOSE, ServedNetwork, open_network
from launcher.after.onnx.parity import OnnxSession, check_parity, mean_cosine, random_batches
from launcher.errors import describe_error, import_optional
from launcher.output import human_bytes

OPSET = 18
"""The version of ONNX's operators that torch's exporter writes without converting."""
GRAPH_FILE, INT8_GRAPH_FILE = "onnx/model.onnx", "onnx/model_quantized.onnx"  # paths in the exported folder
_MAX_FILE_BYTES = 1_900_000_000  # larger weights go into a file of their own: a protobuf holds 2 GiB at most


@dataclass(frozen=True)
class OnnxGraph:
    """A graph that was written and compared with PyTorch.

    Attributes:
        inputs, outputs: names of the graph's inputs and outputs.
        difference: largest relative difference from PyTorch.
        size: bytes of the graph, with its weights.
        int8_size, int8_cosine: bytes of the int8 graph, and mean cosine of its vectors with PyTorch's; None without it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    size: int
    int8_size: int | None = None
    int8_cosine: float | None = None

    def __str__(self) -> str:
        said = (
            f"{GRAPH_FILE}: opset {OPSET}, {human_bytes(self.size)}; {', '.join(self.inputs)} -> "
            f"{', '.join(self.outputs)}; "
            f"differs from PyTorch by at most {self.difference:.0e} of the largest number"
        )
        if self.int8_size is None:
            return said
        int8 = f"{human_bytes(self.int8_size)}, mean cosine with PyTorch {self.int8_cosine:.4f}"
        return f"{said}\n{INT8_GRAPH_FILE}: {int8}"


def require_onnx_packages() -> None:
    """Raise MissingPackage if a package of the extra `onnx` is not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime", "transformers"):
        import_optional(package, ONNX_PURPOSE, ONNX_EXTRA)


def write_graph(folder: Path, *, int8: bool = False) -> OnnxGraph:
    """Add the ONNX graph of its network to a local transformers folder, and describe the graph in the model card.

    Raises:
        ModelError: transformers cannot load the network, torch cannot export it, or the graph differs from PyTorch.
        MissingPackage: a package of the extra `onnx` is not installed.
    """
    require_onnx_packages()
    network = open_network(folder)
    path, small = folder / GRAPH_FILE, folder / INT8_GRAPH_FILE
    path.parent.mkdir()
    with _silence_exporter():
        _export_onnx(folder, network, path)
        made = OnnxGraph(
            network.inputs,
            network.outputs,
            check_parity(folder, OnnxSession(path), network),
            _graph_size_bytes(path),
        )
        if int8:
            _quantise(path, small)
            cosine = mean_cosine(folder, OnnxSession(small), network)
            made = replace(made, int8_size=_graph_size_bytes(small), int8_cosine=cosine)
    with (folder / MODEL_CARD).open("a", encoding="utf-8") as card:
        card.write(f"\n## ONNX\n\n{made}\n")
    return made


def _export_onnx(folder: Path, network: ServedNetwork, path: Path) -> None:
    example = list(random_batches(read_folder_config(folder), network.inputs, 2))[-1].inputs
    size = sum(parameter.nbytes for parameter in network.parameters())
    try:
        torch.onnx.export(
            network,
            kwargs=example,
            f=path,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(network.inputs),
            output_names=list(network.outputs),
            dynamic_shapes={name: {0: "batch", 1: "length"} for name in network.inputs},
            external_data=size > _MAX_FILE_BYTES,
        )
    except Exception as error:  # the exporter may raise anything
        raise ModelError(
            f"torch cannot export {type(network.model).__name__} to ONNX: {describe_error(_root_cause(error))}",
            remedy="export without --onnx",
        ) from error


def _root_cause(error: BaseException) -> Exception:
    """Return the first cause of an exporter's error. The error itself only says which stage failed."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    assert isinstance(error, Exception)
    return error


def _quantise(graph_path: Path, int8_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    external = _graph_size_bytes(graph_path) > _MAX_FILE_BYTES
    with tempfile.TemporaryDirectory(dir=graph_path.parent) as folder:
        # The graph transposes a weight that several products share. Unless the transpose is computed before, it is not
        # a constant, and onnxruntime leaves it in fp32: all layers of an ALBERT, queries and keys of a DeBERTa v2.
        folded = Path(folder) / graph_path.name
        quant_pre_process(graph_path, folded, skip_symbolic_shape=True, save_as_external_data=external)
        quantize_dynamic(folded, int8_path, weight_type=QuantType.QInt8, use_external_data_format=external)


def _graph_size_bytes(graph_path: Path) -> int:
    return sum(part.stat().st_size for part in graph_path.parent.glob(f"{graph_path.name}*"))


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress logs and warnings of torch's exporter and onnxruntime; errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
