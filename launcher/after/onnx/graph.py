"""Adds a network's ONNX graph to its exported folder, where servers look for it: `onnx/model.onnx`.

torch's exporter traces transformers' class, with any number of rows and places. The graph is kept only if it computes
what our PyTorch model computes (`parity.py`). The int8 form is onnxruntime's: weights of matrices and tables in 8
bits, activations quantised as they come.
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
from launcher.after.onnx.network import EXTRA, USE, ServedNetwork, open_network
from launcher.after.onnx.parity import Session, check_parity, mean_cosine, samples
from launcher.errors import describe_error, import_optional
from launcher.output import human_bytes

OPSET = 18
"""The version of ONNX's operators that torch's exporter writes without converting."""
GRAPH, INT8_GRAPH = "onnx/model.onnx", "onnx/model_quantized.onnx"
_MAX_FILE_BYTES = 1_900_000_000  # bytes; a protobuf holds 2 GiB at most


@dataclass(frozen=True)
class OnnxGraph:
    """A graph that was written and compared.

    Attributes:
        inputs, outputs: their names.
        difference: largest relative difference from PyTorch.
        size: bytes of the graph, with its weights.
        int8_size, int8_cosine: bytes of the int8 form, and the mean cosine of its vectors with PyTorch's; None without.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    size: int
    int8_size: int | None = None
    int8_cosine: float | None = None

    def __str__(self) -> str:
        said = (
            f"{GRAPH}: opset {OPSET}, {human_bytes(self.size)}; {', '.join(self.inputs)} -> {', '.join(self.outputs)}; "
            f"differs from PyTorch by at most {self.difference:.0e} of the largest number"
        )
        if self.int8_size is None:
            return said
        return f"{said}\n{INT8_GRAPH}: {human_bytes(self.int8_size)}, mean cosine with PyTorch {self.int8_cosine:.4f}"


def check_installed() -> None:
    """Raise MissingPackage if a package of the extra is not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime", "transformers"):
        import_optional(package, USE, EXTRA)


def write_graph(folder: Path, *, int8: bool = False) -> OnnxGraph:
    """Write the graph of the network in the local transformers folder `folder` below it, and name it in its card.

    Raises:
        ModelError: transformers or torch's exporter cannot make it, or it differs from PyTorch.
        MissingPackage: a package of the extra is not installed.
    """
    check_installed()
    network = open_network(folder)
    path, small = folder / GRAPH, folder / INT8_GRAPH
    path.parent.mkdir()
    with _silence_exporter():
        _trace(folder, network, path)
        made = OnnxGraph(
            network.inputs, network.outputs, check_parity(folder, Session(path), network), _size(path)
        )
        if int8:
            _quantise(path, small)
            cosine = mean_cosine(folder, Session(small), network)
            made = replace(made, int8_size=_size(small), int8_cosine=cosine)
    with (folder / MODEL_CARD).open("a", encoding="utf-8") as card:
        card.write(f"\n## ONNX\n\n{made}\n")
    return made


def _trace(folder: Path, network: ServedNetwork, path: Path) -> None:
    example = list(samples(read_folder_config(folder), network.inputs, 2))[-1].inputs
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
    except Exception as error:  # whatever it is: see `describe_error`
        raise ModelError(
            f"torch's exporter makes no ONNX graph of {type(network.model).__name__}: "
            f"{describe_error(_root_cause(error))}",
            remedy="export without --onnx",
        ) from error


def _root_cause(error: BaseException) -> Exception:
    """Return what torch's exporter met: its own errors tell the stage, and whom to write to."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    assert isinstance(error, Exception)
    return error


def _quantise(path: Path, small: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    external = _size(path) > _MAX_FILE_BYTES
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # A weight that several products share is transposed in the graph. Unless that is computed before, it is no
        # constant to the quantiser, which leaves it in fp32: all layers of an ALBERT, queries and keys of a DeBERTa v2.
        folded = Path(folder) / path.name
        quant_pre_process(path, folded, skip_symbolic_shape=True, save_as_external_data=external)
        quantize_dynamic(folded, small, weight_type=QuantType.QInt8, use_external_data_format=external)


def _size(path: Path) -> int:
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress what exporter and quantiser log and print about their own ways; errors still arise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
