"""ONNX graphs of each family beside transformers' class: python tests/bench/onnx_pairs.py [FAMILY...].

Random weights, exported as `checkpoints export --onnx --int8` does. Differences and cosines are over random padded
rows; seconds are of rows without padding, in turn with PyTorch, on one thread each: PyTorch's by a graph's, above 1 if
the graph is quicker. Needs `pip install 'maskfleet[onnx]'`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from program import BenchError, note, run

from checkpoints.hf.load import read_folder_config
from launcher.after.onnx.graph import GRAPH, INT8_GRAPH, OnnxGraph, write_graph
from launcher.after.onnx.network import ServedNetwork, open_network
from launcher.after.onnx.parity import (
    ReferenceEncoder,
    Sample,
    Session,
    in_torch,
    relative_difference,
    samples,
)
from tests.support.models.exports import SERVED, Family, export

_STATES = "last_hidden_state"
_BEST_OF = 3  # calls that one figure is the quickest of


@dataclass(frozen=True)
class Served:
    """What a family's graphs are, beside PyTorch.

    Attributes:
        made: sizes, and the difference that the export states.
        difference: largest difference of fp32 states from our encoder, relative to the largest number.
        cosines: mean cosine of the states of fp32 and int8.
        ratios: seconds of PyTorch by those of fp32 and int8, medians.
    """

    made: OnnxGraph
    difference: float
    cosines: tuple[float, float]
    ratios: tuple[float, float]


def widened(family: Family, hidden: int, layers: int, length: int) -> Family:
    """The family at this size."""
    size = {
        "hidden": hidden,
        "layers": layers,
        "max_length": length,
        "heads": hidden // 64,
        "feed_forward": 4 * hidden,
    }
    sizes = size | {"key_value_heads": hidden // 64, "embedding": hidden // 2, "local_attention": 64}
    config = family.config
    return replace(
        family, config=config.model_copy(update={key: n for key, n in sizes.items() if hasattr(config, key)})
    )


def measured(family: Family, folder: Path, *, batches: int, pairs: int, rows: int) -> Served:
    export(family, folder)
    place = folder / family.folders[-1]
    made = write_graph(place, int8=True)
    network, own, config = open_network(place), ReferenceEncoder(place), read_folder_config(place)
    graphs = [Session(place / name) for name in (GRAPH, INT8_GRAPH)]
    drawn = list(samples(config, network.inputs, batches, seed=1))
    wanted = [own(sample) for sample in drawn]
    found = [[graph(sample)[_STATES] for sample in drawn] for graph in graphs]
    return Served(
        made,
        relative_difference(np.concatenate(found[0]), np.concatenate(wanted)),
        (cosine(found[0], wanted), cosine(found[1], wanted)),
        ratios(network, graphs, full(drawn, rows, config.max_length), pairs),
    )


def cosine(found: Sequence[NDArray[np.float32]], wanted: Sequence[NDArray[np.float32]]) -> float:
    one, other = np.concatenate(found), np.concatenate(wanted)
    return float(
        np.mean((one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1))
    )


def full(drawn: Sequence[Sample], rows: int, length: int) -> Sample:
    """Rows of the most tokens: those of the samples, again and again."""
    tokens: Mapping[str, torch.Tensor] = {
        name: torch.cat([sample.inputs[name][torch.from_numpy(sample.mask)] for sample in drawn])
        for name in drawn[0].inputs
    }
    inputs = {
        name: its.repeat(rows * length // len(its) + 1)[: rows * length] for name, its in tokens.items()
    }
    return Sample({name: its.view(rows, length) for name, its in inputs.items()}, (length,) * rows)


def ratios(
    network: ServedNetwork, graphs: Sequence[Session], sample: Sample, pairs: int
) -> tuple[float, float]:
    def seconds(call: Callable[[], object]) -> float:
        spent = []
        for _ in range(_BEST_OF):
            began = time.perf_counter()
            call()
            spent.append(time.perf_counter() - began)
        return min(spent)

    found = []
    for _ in range(pairs):
        plain = seconds(lambda: in_torch(network, sample))
        found.append([plain / seconds(lambda graph=graph: graph(sample)) for graph in graphs])  # type: ignore[misc]
    exact, small = (statistics.median(its) for its in zip(*found, strict=True))
    return exact, small


def main(
    families: Annotated[list[str] | None, typer.Argument(help="All, if none is named.")] = None,
    hidden: int = 256,
    layers: int = 4,
    length: int = 128,
    rows: int = 8,
    batches: int = 200,
    pairs: int = 5,
) -> None:
    """Measure each family."""
    torch.set_num_threads(1)
    print(
        "| family | outputs | largest difference | MB fp32, int8 | cosine fp32, int8 | PyTorch s / fp32, int8 |"
    )
    print("|---|---|--:|--:|--:|--:|")
    for name in families or SERVED:
        if name not in SERVED:
            raise BenchError(f"no family {name}", remedy=f"give some of {', '.join(SERVED)}")
        note(f"{name} ...")
        with tempfile.TemporaryDirectory() as folder:
            family = widened(SERVED[name], hidden, layers, length)
            its = measured(family, Path(folder), batches=batches, pairs=pairs, rows=rows)
        sizes = f"{its.made.size / 1e6:.1f}, {(its.made.int8_size or 0) / 1e6:.1f}"
        cosines, quicker = (
            ", ".join(f"{x:.{d}f}" for x in xs) for xs, d in ((its.cosines, 5), (its.ratios, 2))
        )
        print(
            f"| {name} | {', '.join(its.made.outputs)} | {its.difference:.1e} | {sizes} | {cosines} | {quicker} |",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
