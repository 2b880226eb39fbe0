"""Checks that an ONNX graph computes what its network computes, on random padded rows.

Shapes: R rows, L tokens in each, with padding; T tokens of all rows, without padding; H hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoints.hf.load import read_folder_config
from encoder_core.batch import batch_without_targets
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig, embedded_languages
from launcher.after.diagnose.states import layer_states, load_frozen_encoder
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.onnx.network import ONNX_EXTRA, ONNX_PURPOSE, GraphInputs, ServedNetwork
from launcher.errors import import_optional

PARITY_TOLERANCE = 1e-4
"""Largest difference between the outputs of ONNX and torch that counts as rounding, relative to the largest output."""
_BATCH_COUNT, _MAX_BATCH_ROWS = 6, 4  # number of random batches that are compared, and most rows of a batch
_MAX_SAMPLE_TOKENS = 300  # largest number of tokens of a row: more than a window of local attention
GraphOutputs = Mapping[str, NDArray[np.float32]]
"""Outputs of a graph by name. Those with a value for each token have no padding: [T, ...]."""


@dataclass(frozen=True)
class RandomBatch:
    """A batch of random rows.

    Attributes:
        inputs: inputs of a graph by name, each [R, L] int64.
        lengths: number of tokens of each of the R rows.
    """

    inputs: GraphInputs
    lengths: tuple[int, ...]

    @property
    def token_mask(self) -> NDArray[np.bool_]:
        """[R, L], true at tokens and false at padding."""
        return self.inputs["attention_mask"].numpy().astype(bool)


def random_batches(config: ModelConfig, input_names: Sequence[str], count: int, seed: int = 0) -> Iterator[RandomBatch]:
    """Yield `count` batches with the inputs `input_names`: 1 to 4 rows of 1 to 300 tokens, or to the model's maximum.
    Rows are padded on the side of the model's tokenizer, some of them beyond the longest row."""
    generator = torch.Generator().manual_seed(seed)

    def random_integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    most = min(config.max_length, _MAX_SAMPLE_TOKENS)
    for index in range(count):
        rows = int(random_integers(1, _MAX_BATCH_ROWS + 1))
        lengths = random_integers(1, (most if index % 2 else min(most, 16)) + 1, rows)
        places = min(most, int(lengths.max()) + int(random_integers(0, 3)))
        mask = torch.arange(places) < lengths[:, None]
        mask = mask.flip(1) if config.class_token_last else mask
        ids = (
            config.pad_id + random_integers(1, config.vocabulary_size, rows, places)
        ) % config.vocabulary_size  # any id but padding's
        values = {
            "input_ids": torch.where(mask, ids, config.pad_id),
            "attention_mask": mask.long(),
            "token_type_ids": random_integers(0, 2, rows, places) * mask,
            "langs": random_integers(0, max(1, len(embedded_languages(config))), rows, places),
        }
        yield RandomBatch({name: values[name] for name in input_names}, tuple(lengths.tolist()))


class OnnxSession:
    """A graph in onnxruntime, on one CPU thread. Raises MissingPackage if onnxruntime is not installed."""

    def __init__(self, path: Path) -> None:
        library = import_optional("onnxruntime", ONNX_PURPOSE, ONNX_EXTRA)
        options = library.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = library.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.outputs = [output.name for output in self._session.get_outputs()]

    def __call__(self, sample: RandomBatch) -> GraphOutputs:
        found = self._session.run(None, {name: tensor.numpy() for name, tensor in sample.inputs.items()})
        return _drop_padding(dict(zip(self.outputs, found, strict=True)), sample)


@torch.no_grad()
def run_in_torch(network: ServedNetwork, sample: RandomBatch) -> GraphOutputs:
    """Return the outputs that the network computes in PyTorch."""
    found = [output.numpy() for output in network(**sample.inputs)]
    return _drop_padding(dict(zip(network.outputs, found, strict=True)), sample)


def _drop_padding(outputs: GraphOutputs, sample: RandomBatch) -> GraphOutputs:
    vector = "sentence_embedding"
    return {name: output if name == vector else output[sample.token_mask] for name, output in outputs.items()}


class ReferenceEncoder:
    """Our own encoder with the weights of a folder: it computes the hidden states that a graph should compute. Raises
    as `load_frozen_encoder`."""

    def __init__(self, folder: Path) -> None:
        self._encoder = load_frozen_encoder(LocalModel(str(folder), None, folder, "")).encoder

    @torch.no_grad()
    def __call__(self, sample: RandomBatch) -> NDArray[np.float32]:
        """Return the last layer's states, [T, H]."""
        mask = torch.from_numpy(sample.token_mask)
        batch = batch_without_targets(sample.inputs["input_ids"][mask], sample.lengths)
        types, languages = (sample.inputs.get(name) for name in ("token_type_ids", "langs"))
        segments = torch.zeros_like(batch.tokens) if types is None else types[mask]
        batch = replace(batch, segments=segments, languages=None if languages is None else languages[mask])
        states: NDArray[np.float32] = layer_states(self._encoder, batch)[-1].numpy()
        return states


def check_parity(folder: Path, session: OnnxSession, network: ServedNetwork) -> float:
    """Return the largest relative difference between a graph and PyTorch. All outputs are compared with transformers'
    class, and the hidden states also with our own encoder.

    Raises:
        ModelError: the difference exceeds PARITY_TOLERANCE or is not a number, or the graph fails on some shape.
    """
    config, own = read_folder_config(folder), ReferenceEncoder(folder)
    pairs: dict[str, list[tuple[NDArray[np.float32], NDArray[np.float32]]]] = {}
    for sample in random_batches(config, network.inputs, _BATCH_COUNT):
        try:
            found = session(sample)
        except Exception as error:  # onnxruntime has no error class for a failing graph
            raise _graph_error(f"fails on {list(sample.token_mask.shape)} tokens: {error}") from error
        for name, wanted in run_in_torch(network, sample).items():
            pairs.setdefault(name, []).append((found[name], wanted))
        pairs["last_hidden_state"].append((found["last_hidden_state"], own(sample)))
    worst = 0.0
    for name, its in pairs.items():
        # All samples are compared at once: the only score of a small sample may be near 0, where rounding is large.
        difference = relative_difference(*(np.concatenate(arrays) for arrays in zip(*its, strict=True)))
        if not difference <= PARITY_TOLERANCE:
            raise _graph_error(f"differs from PyTorch's {name} by {difference:.1e} of its largest number")
        worst = max(worst, difference)
    return worst


def relative_difference(computed: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest difference, relative to the largest number in `expected`; NaN if an array has a NaN."""
    return float(np.abs(computed - expected).max() / np.abs(expected).max())


def mean_cosine(folder: Path, session: OnnxSession, network: ServedNetwork) -> float:
    """Return the mean cosine between a quantized graph's vectors and PyTorch's: vectors of texts if the graph has them,
    else of tokens."""
    vector = "sentence_embedding" if "sentence_embedding" in network.outputs else "last_hidden_state"
    cosines: list[float] = []
    for sample in random_batches(read_folder_config(folder), network.inputs, _BATCH_COUNT):
        found, wanted = session(sample)[vector], run_in_torch(network, sample)[vector]
        lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
        cosines += ((found * wanted).sum(-1) / lengths).tolist()
    return float(np.mean(cosines))


def _graph_error(problem: str) -> ModelError:
    return ModelError(
        f"the ONNX graph from torch's exporter {problem}",
        remedy="export without --onnx; or install the tested versions: pip install -c infra/constraints.txt "
        "'maskfleet[onnx]'",
    )
