"""What an estimate takes for granted: measured or published, and where; the rest is named as a guess."""

import re
from dataclasses import dataclass

from launcher.errors import EstimateError
from launcher.runtime.capacity.cluster import GIB, Gpu

CONTEXT = 1 * GIB  # of a GPU's memory, for CUDA, cuBLAS and NCCL: a guess
FRAGMENTED = 0.05  # share of a GPU's memory that the allocator cannot use: a guess
LINK_SHARE = 0.8  # of a link's rate that a collective reaches: a guess
COPY_RATE = 10e9  # bytes/s from a GPU to its host while training waits: PCIe 4.0 x16 reaches about twice that; a guess
STORE_RATE = 1e9  # bytes/s from one node to object storage: a guess; 10 Gbit/s of its network
SAVE_FIXED = (
    0.2  # s that training waits for any save: its collectives, and steps slowed by the upload; a guess
)
RESTART = 60.0  # s from a failure to the next step, loading apart: Ray's restart took 10-26 s on 2 cores; NCCL on top
MTBF_HOURS = 54 * 24 * 2048 / 419
"""Of a node: Llama 3 405B had 419 interruptions in 54 days on 2,048 nodes of 8 H100. Spot machines last far less."""

TOKEN_BYTES = (
    4.4  # of English text, to a vocabulary of 30,000 to 50,000: a guess; `maskfleet tokenizer check` measures
)


def usable(memory: int) -> int:
    """Of a GPU's memory, after what is assumed to be lost."""
    return int(memory * (1 - FRAGMENTED)) - CONTEXT


@dataclass(frozen=True)
class AssumedUtilisation:
    """Share of a GPU's peak that model FLOPs reach, and where that is from.

    Attributes:
        measured: on devices of this kind, and not assumed.
        by_roofline: computed by `roofline.py`, whose parts an estimate then shows.
        step: seconds of a whole step, the network's included, where that was measured on just such a cluster.
    """

    share: float
    source: str
    measured: bool = False
    step: float | None = None
    by_roofline: bool = False


def published(hidden: int, length: int, gpu: Gpu) -> AssumedUtilisation:
    """A published run's of like width. None of ours was measured on a GPU."""
    if hidden < 512:
        return AssumedUtilisation(0.03, "ELECTRA-Small, 4 days on a V100, its authors' fp32 code: 2.7 %")
    if hidden < 1024:
        return AssumedUtilisation(0.25, "ModernBERT-base, 8 x H100: 304k tokens/s a GPU")
    if gpu.half == "fp16":
        if length <= 128:
            return AssumedUtilisation(0.51, "BERT-Large, DeepSpeed on V100, rows of 128: 64 TFLOPS")
        return AssumedUtilisation(0.42, "BERT-Large, DeepSpeed on V100, rows of 512: 53 TFLOPS")
    if gpu.name.startswith("A100") and length <= 128:
        return AssumedUtilisation(0.45, "BERT-Large, NVIDIA on A100, rows of 128: 580 sequences/s")
    return AssumedUtilisation(0.48, "BERT-Large, MLPerf 3.1, 8 x H100: 7,760 sequences/s, packed")


def check_share(mfu: float | None) -> None:
    """Raises EstimateError: a utilisation that is given, and can be none."""
    if mfu is not None and not 0 < mfu <= 1:
        raise EstimateError(f"a utilisation of {mfu:g}", remedy="give a share above 0, at most 1")


def text_size(told: str) -> float:
    """Bytes, of "160GB" or "1.5 TiB". Raises EstimateError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", told, re.IGNORECASE)
    size = 0.0
    if found is not None:
        number, prefix, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    if not size:
        raise EstimateError(f"a text of {told!r}", remedy="give its size uncompressed, such as 160GB")
    return size
