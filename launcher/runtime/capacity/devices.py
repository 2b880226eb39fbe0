"""What `maskfleet estimate` assumes of machines: the data-sheet figures of GPUs (FLOP/s, memory, bandwidth), and the
constants of the estimate. Each constant is measured, has a published source, or is marked as a guess."""

import re
from dataclasses import dataclass

from launcher.errors import EstimateError

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """The data-sheet figures of a GPU, and the links of the nodes in which it is usually sold.

    Attributes:
        name: name of the GPU for `--gpu`.
        peak: FLOP/s of dense matrix products in bf16 with fp32 sums; in fp16 on the V100, which has no bf16.
        peak_fp32: FLOP/s of dense matrix products in fp32, without TF32.
        memory: size of its memory in bytes.
        bandwidth: bytes/s of its memory.
        link: bytes/s, each way, between GPUs of one node (NVLink, or PCIe).
        network: bytes/s, each way, of a node's network, as the large clouds offer it with this GPU.
        half: the 16-bit format of `peak`: "bf16", or "fp16" on a GPU without bf16.
    """

    name: str
    peak: float
    peak_fp32: float
    memory: int
    bandwidth: float
    link: float
    network: float
    half: str = "bf16"


def _gpu_from_datasheet(
    name: str,
    tflops: float,
    fp32_tflops: float,
    memory_gib: int,
    bandwidth_gb_s: float,
    link_gb_s: float,
    network_gbit: float,
) -> Gpu:
    half = "fp16" if name == "V100" else "bf16"
    rates = (bandwidth_gb_s * 1e9, link_gb_s * 1e9, network_gbit * 1e9 / 8)
    return Gpu(name, tflops * 1e12, fp32_tflops * 1e12, memory_gib * GIB, *rates, half)


# Peak (without sparsity), memory and bandwidth: the data sheets of NVIDIA (SXM versions where there are several) and
# of AMD. Links: NVLink's one-way rate; for the MI300X, seven links of 64 GB/s each way; PCIe x16 for L4, L40S and
# A10G. Networks: AWS p3dn, p4d, p4de, p5, p5e, p6-b200, g6.48xlarge, g6e.48xlarge and g5.48xlarge; Azure ND MI300X v5.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu_from_datasheet("V100", 125, 15.7, 32, 900, 150, 100),
        _gpu_from_datasheet("A10G", 70, 35, 24, 600, 16, 100),
        _gpu_from_datasheet("A100-40", 312, 19.5, 40, 1555, 300, 400),
        _gpu_from_datasheet("A100-80", 312, 19.5, 80, 2039, 300, 400),
        _gpu_from_datasheet("L4", 121, 30.3, 24, 300, 16, 100),
        _gpu_from_datasheet("L40S", 362, 91.6, 48, 864, 32, 400),
        _gpu_from_datasheet("H100", 989, 67, 80, 3350, 450, 3200),
        _gpu_from_datasheet("H200", 989, 67, 141, 4800, 450, 3200),
        _gpu_from_datasheet("B200", 2250, 75, 180, 7700, 900, 3200),
        _gpu_from_datasheet("MI300X", 1307, 163.4, 192, 5300, 448, 3200),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU called `name`, whatever its case. Raises EstimateError, which lists the known names, if the table
    has no such GPU."""
    known = {known.lower(): gpu for known, gpu in GPUS.items()}
    gpu = known.get(name.lower())
    if gpu is None:
        raise EstimateError(f"no data sheet is known for a GPU {name!r}", remedy=f"use one of {', '.join(GPUS)}")
    return gpu


def match_gpu_by_device_name(name: str, memory_bytes: int) -> Gpu | None:
    """Return the table's GPU for a device name that CUDA or ROCm reports; None if the table lacks it. `memory_bytes`
    tells the A100 with 40 GB from the one with 80 GB.

    The table has the SXM versions of the V100, H100 and H200. Their PCIe and NVL versions are slower: None.
    """
    found = re.search(r"\b(V100|A10G|A100|L40S|L4|H100|H200|B200|MI300X)\b", name)
    slower = re.search(r"PCIe|NVL", name, re.IGNORECASE)
    if found is None or (slower and found[1] in ("V100", "H100", "H200")):
        return None
    if found[1] == "A100":
        return GPUS["A100-80" if memory_bytes > 60 * GIB else "A100-40"]
    return GPUS[found[1]]


@dataclass(frozen=True)
class Cluster:
    """A cluster of `nodes` machines with `gpus_per_node` GPUs each. `mtbf`: mean seconds between failures of one node.

    Raises EstimateError if `nodes` or `gpus_per_node` is below 1, or `mtbf` is not above 0.
    """

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    mtbf: float

    def __post_init__(self) -> None:
        for what, value in (("nodes", self.nodes), ("GPUs per node", self.gpus_per_node)):
            if value < 1:
                raise EstimateError(f"{value} {what}: training needs at least 1", remedy="give at least 1")
        if not self.mtbf > 0:
            raise EstimateError("the mean time between failures is 0 or less", remedy="give a number of hours above 0")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def slowest_link_rate(self) -> float:
        """Bytes/s of the slowest link in a ring through all GPUs. The ring leaves and enters each node once."""
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, self.gpu.network)


CONTEXT_BYTES = 1 * GIB  # bytes of a GPU's memory that CUDA, cuBLAS and NCCL take: a guess
FRAGMENTED_SHARE = 0.05  # share of a GPU's memory that the allocator cannot use: a guess
LINK_SHARE = 0.8  # share of a link's rate that a collective reaches: a guess
# Bytes/s of copies from a GPU to its host: a guess, about half of what PCIe 4.0 x16 reaches.
GPU_TO_HOST_BYTES_S = 10e9
STORE_BYTES_S = 1e9  # bytes/s from one node to object storage: a guess, about 10 Gbit/s
# Seconds that each save costs training apart from the copies: collectives, steps slowed by the upload; a guess.
SAVE_PAUSE_S = 0.2
# Seconds from a failure to the next step, apart from loading the checkpoint: a guess. Ray took 10-26 s on 2 cores.
RESTART_S = 60.0
NODE_MTBF_HOURS = 54 * 24 * 2048 / 419
"""Mean time between failures of a node, in hours: Llama 3 405B had 419 interruptions in 54 days on 2,048 nodes of 8
H100. Spot machines last far less."""

# Bytes of English text for each token of a vocabulary of 30,000 to 50,000: a guess; `maskfleet tokenizer check`
# measures it for a tokenizer.
BYTES_PER_TOKEN = 4.4


def usable_gpu_bytes(gpu_bytes: int) -> int:
    """Return how many of a GPU's `gpu_bytes` training can use: all but fragmented memory and the CUDA context."""
    return int(gpu_bytes * (1 - FRAGMENTED_SHARE)) - CONTEXT_BYTES


@dataclass(frozen=True)
class AssumedUtilisation:
    """The model FLOPs utilisation (MFU) that an estimate assumes, from 0 to 1, and where the number comes from.
    `measured`: whether one of the user's own runs recorded it."""

    share: float
    source: str
    measured: bool = False


def check_mfu(mfu: float) -> None:
    """Raise EstimateError unless 0 < `mfu` <= 1 (model FLOPs utilisation)."""
    if not 0 < mfu <= 1:
        raise EstimateError(f"an MFU of {mfu:g} is impossible", remedy="give a share above 0, at most 1")


def parse_text_size(text: str) -> float:
    """Return the number of bytes in a text such as "160GB" or "1.5 TiB". Raises EstimateError if `text` is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    size = 0.0
    if found is not None:
        number, prefix, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    if not size:
        raise EstimateError(f"{text!r} is not a size of a text", remedy="give its size uncompressed, such as 160GB")
    return size
