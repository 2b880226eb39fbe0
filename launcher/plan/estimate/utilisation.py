"""The share of a GPU's peak that a step reaches (MFU), from published runs, our measurements, or a run's records.

A step's time follows from its FLOPs and this share. Networks of one kind and width reach similar shares.
"""

import math
from dataclasses import dataclass

import numpy as np

from data_service.store.open import open_store
from encoder_core.families.catalogue import ModelConfig
from launcher.errors import EstimateError
from launcher.runtime.capacity.devices import AssumedUtilisation, Gpu, check_mfu
from launcher.runtime.run.history import read_history

_MEDIAN_STEPS = 1000  # number of a run's newest steps whose median share is used


@dataclass(frozen=True)
class ReferenceRun:
    """A run whose utilisation (MFU) is known.

    Attributes:
        kind: model families with similar utilisation.
        hidden, length: width of its network, and tokens of its rows.
        gpu: beginning of the GPU's name.
        source: run and publication or file that the share comes from, for the user.
    """

    kind: frozenset[str]
    hidden: int
    length: int
    gpu: str
    share: float
    source: str


# Model families that reach similar shares of a GPU's peak.
_ABSOLUTE_POSITION_FAMILIES = frozenset({"bert", "roberta", "albert", "electra", "xlm", "bart"})
_RELATIVE_POSITION_FAMILIES = frozenset({"deberta", "deberta_v2", "xlnet"})
_PRE_NORM_FAMILIES = frozenset({"modernbert", "eurobert", "neobert"})
_OWN_RESULTS_FILE = "tests/bench/RESULTS-gpu.md"
REFERENCE_RUNS = (
    ReferenceRun(
        _ABSOLUTE_POSITION_FAMILIES,
        256,
        128,
        "V100",
        0.03,
        "ELECTRA-small, 4 days on a V100, its authors' code in fp32",
    ),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 768, 512, "H200", 0.301, f"RoBERTa base, {_OWN_RESULTS_FILE}"),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 1024, 128, "H200", 0.404, f"BERT-large, {_OWN_RESULTS_FILE}"),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 1024, 512, "H200", 0.361, f"BERT-large, {_OWN_RESULTS_FILE}"),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 1024, 128, "V100", 0.51, "BERT-Large, DeepSpeed: 272 rows/s"),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 1024, 512, "V100", 0.42, "BERT-Large, DeepSpeed: 52 rows/s"),
    ReferenceRun(_ABSOLUTE_POSITION_FAMILIES, 1024, 128, "A100", 0.45, "BERT-Large, NVIDIA: 580 rows/s"),
    ReferenceRun(_RELATIVE_POSITION_FAMILIES, 768, 512, "H200", 0.122, f"DeBERTa v3 base, {_OWN_RESULTS_FILE}"),
    ReferenceRun(_PRE_NORM_FAMILIES, 768, 1024, "H200", 0.264, f"ModernBERT base, {_OWN_RESULTS_FILE}"),
)


def assume_utilisation(model: ModelConfig, length: int, gpu: Gpu) -> AssumedUtilisation:
    """Return the share of the known run that is most similar to training `model` on rows of `length` tokens on `gpu`.
    The kind of network counts most, then its width, then the GPU, then the length of rows."""

    def dissimilarity(known: ReferenceRun) -> tuple[bool, float, bool, float]:
        width, rows = math.log(known.hidden / model.hidden), math.log(known.length / length)
        return model.family not in known.kind, abs(width), not gpu.name.startswith(known.gpu), abs(rows)

    nearest = min(REFERENCE_RUNS, key=dissimilarity)
    return AssumedUtilisation(
        nearest.share, f"{nearest.source} ({nearest.gpu}, {nearest.hidden} wide, rows of {nearest.length})"
    )


def parse_utilisation(text: str) -> AssumedUtilisation:
    """Return the share that the user gives: a number, or the URI of a run that recorded its own.

    Raises:
        EstimateError: the number is not a share, or the run recorded no share.
        StoreError: the run's records cannot be read.
    """
    try:
        share = float(text)
    except ValueError:
        return _read_recorded_utilisation(text)
    check_mfu(share)
    return AssumedUtilisation(share, "given")


def _read_recorded_utilisation(uri: str) -> AssumedUtilisation:
    shares = read_history(open_store(uri)).steps.newest(_MEDIAN_STEPS).column("mfu")
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        raise EstimateError(
            f"{uri} is neither a share nor a run that recorded its share, as runs on GPUs with a known peak do",
            remedy="give a share, such as 0.3, or a run that trained on a GPU that --gpu knows",
        )
    return AssumedUtilisation(float(np.median(shares)), f"median of {len(shares)} steps of {uri}", measured=True)
