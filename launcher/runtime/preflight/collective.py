"""The preflight of a group of ranks: one rank of each node examines its node, all reports are exchanged, and all ranks
agree on which nodes are unfit. All nodes must run the same code: versions of the numerical libraries, and a hash of our
own sources.

If no node is unfit, the ranks then sum known numbers, over the same process group that will train (NCCL on GPUs, gloo
on CPUs). The examination comes first, because too little shared memory or different versions make NCCL hang. The ranks
also send the numbers around a ring, check every number on arrival, and time the links of the ring.

A wrong sum over all ranks does not show where the error is. So each rank also checks the numbers that its own device
computed, the numbers that arrived from the previous rank, and the sum of these two. While a link of the ring is timed,
its two ranks do nothing else, so that a slow link does not slow the measurement of its neighbour.
"""

import hashlib
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float32
from pydantic import TypeAdapter
from torch import Tensor

from checkpoints.gather import Peers, gather_as
from launcher.runtime.capacity.devices import match_gpu_by_device_name
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, RankSums, Verdict, WrongNumbers, worst_verdict
from launcher.runtime.preflight.measure import PreflightSubject, run_checks
from launcher.runtime.preflight.network import network_line_rate
from launcher.runtime.preflight.releases import triton_release

_COMPARED_LIBRARIES = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "safetensors")  # must be equal on all nodes
_REPOSITORY_ROOT = Path(__file__).parents[3]
_SOURCE_PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")  # packages that `source_digest` hashes


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, Maskfleet and the numerical libraries, by name; on GPUs CUDA, NCCL, Triton too."""
    gpu = torch.cuda.is_available()
    own = {"CUDA": str(torch.version.cuda), "NCCL": _nccl_version(), "Triton": triton_release()} if gpu else {}
    return loaded_versions() | own


@cache
def loaded_versions() -> dict[str, str]:
    """Return the versions of Python, Maskfleet and the numerical libraries, by name. They are read once per process, so
    that a restart on a network file system does not read hundreds of files again."""
    ours = {
        "python": platform.python_version(),
        "maskfleet": f"{metadata.version('maskfleet')}+{source_digest()}",
    }
    return ours | {name: metadata.version(name) for name in _COMPARED_LIBRARIES}


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def source_digest() -> str:
    """Return a hash of our own source code."""
    digest = hashlib.sha256()
    for path in sorted(path for package in _SOURCE_PACKAGES for path in (_REPOSITORY_ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(_REPOSITORY_ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class NodeReport:
    """The report of one node about itself.

    Attributes:
        node: id of the node in Ray.
        host: name of the machine.
        seconds: time that the examination took.
        findings: results of the checks.
        versions: installed versions, by name (`installed_versions`).
    """

    node: str
    host: str
    seconds: float
    findings: tuple[Finding, ...]
    versions: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        return worst_verdict(self.findings)

    def findings_with(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]

    def event_fields(self) -> dict[str, object]:
        """Return the fields of the `preflight` event."""
        problems = [f"{f.what}: {f.found}" for f in self.findings if f.verdict != "ok"]
        checks = {f.what: f.found for f in self.findings}
        head = {"node": self.node, "host": self.host, "verdict": self.verdict, "seconds": self.seconds}
        return {**head, "problems": problems, "checks": checks, "versions": self.versions}


# Converts reports for the exchange between ranks. A rank that examined no node sends None.
_REPORT_ADAPTER: TypeAdapter[NodeReport | None] = TypeAdapter(NodeReport | None)


class UnfitGroup(Exception):
    """The exception that ends a group of ranks because some of its nodes must not train. All ranks raise it.
    `reports`: the reports of these nodes."""

    def __init__(self, reports: "Sequence[NodeReport]") -> None:
        super().__init__(problem_and_remedy(reports)[0])
        self.reports = reports


def preflight(subject: PreflightSubject, peers: Peers, nodes: Sequence[str]) -> list[NodeReport]:
    """Examine each node on one rank: the first whose process has an earlier report of the node, or else the node's
    first rank. Return a report for each node, in the order of these ranks. Collective. `nodes`: node of each rank."""
    known = peers.all_gather(_earlier_report(subject, nodes[peers.rank]) is not None)
    here = [rank for rank, node in enumerate(nodes) if node == nodes[peers.rank]]
    leader = next((rank for rank in here if known[rank]), here[0]) == peers.rank
    report = _examine_node(subject, nodes[peers.rank]) if leader else None
    return add_version_findings([each for each in gather_as(peers, _REPORT_ADAPTER, report) if each is not None])


def unfit_reports(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the reports of nodes on which no rank may train."""
    return [report for report in reports if report.verdict == "failure"]


def problem_and_remedy(reports: Sequence[NodeReport]) -> tuple[str, str]:
    """Return what is wrong with unfit nodes, and what to do about it."""
    wrong = [(report, finding) for report in reports for finding in report.findings_with("failure")]
    texts = [f"node {report.node[:8]} ({report.host}): {f.what}: {f.found}" for report, f in wrong]
    return "; ".join(texts), "; ".join(dict.fromkeys(finding.remedy for _, finding in wrong))


def warning_lines(reports: Sequence[NodeReport]) -> list[str]:
    """Return the warnings as lines for the operator; one line for all nodes with the same warning."""
    found: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for finding in report.findings_with("warning"):
            text = (f"{finding.what}: {finding.found}", finding.remedy)
            found.setdefault(text, []).append(report.host)
    return [f"preflight, {', '.join(hosts)}: {what} ({remedy})" for (what, remedy), hosts in found.items()]


def add_version_findings(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the reports with a finding for each version that differs from that of most nodes."""
    differing: Mapping[str, list[Finding]] = findings.judge_versions({r.node: r.versions for r in reports})
    return [replace(r, findings=(*r.findings, *differing[r.node])) for r in reports]


def add_sum_findings(
    reports: Sequence[NodeReport], rank_sums: Sequence[RankSums], nodes: Sequence[str]
) -> list[NodeReport]:
    """Return the reports with findings on the trial sums added. `rank_sums`, `nodes`: results and node of each rank."""
    names = {report.node: f"node {report.node[:8]}, {report.host}" for report in reports}
    sum_verdict = findings.judge_sums(rank_sums, [names[node] for node in nodes])
    took = max(one.seconds for one in rank_sums)
    return [replace(r, seconds=r.seconds + took, findings=(*r.findings, *sum_verdict[names[r.node]])) for r in reports]


_reports: list[tuple[PreflightSubject, NodeReport]] = []  # at most one entry: this process's newest report


def _earlier_report(subject: PreflightSubject, node: str) -> NodeReport | None:
    return next((report for of, report in _reports if of == subject and report.node == node), None)


def _examine_node(subject: PreflightSubject, node: str) -> NodeReport:
    """Return the report of this node; the earlier one if this process has already examined the node for `subject`."""
    if (known := _earlier_report(subject, node)) is not None:
        return replace(known, seconds=0.0)
    started = time.monotonic()
    found, host, versions = tuple(run_checks(subject)), socket.gethostname(), installed_versions()
    report = NodeReport(node, host, time.monotonic() - started, found, versions)
    _reports[:] = [(subject, report)]
    return report


_CHECKED_ELEMENTS = 1 << 16  # number of elements of each trial sum
_PATTERN_COUNT = 64  # distinct results of `rank_pattern`: with more, fp32 sums of 16,000 ranks would be inexact
# Bytes of a timed message, by type of device. From a CPU it takes 20 ms over a link of `findings._SLOW_LINK_BYTES_S`.
_TIMED_MESSAGE_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}
_TIMED_ROUNDS = 2  # number of timed rounds, of which the fastest counts
_SUMS_ADAPTER = TypeAdapter(RankSums)  # converts a rank's results for the exchange between ranks


def first_sums(peers: Peers) -> list[RankSums]:
    """Sum known numbers over all ranks to test devices and links, and return the results in the order of ranks.
    Collective, on all ranks of the default group."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    started = time.monotonic()
    mine = _check_sums(peers.rank, peers.world, device)
    speed, together = _time_links(peers.rank, peers.world, device) if peers.world > 1 else (None, None)
    found = RankSums(
        **mine,
        speed=speed,
        together=together,
        inside=_link_rate_inside_node(device),
        line=network_line_rate() if device.type == "cuda" else None,
        seconds=time.monotonic() - started,
    )
    return gather_as(peers, _SUMS_ADAPTER, found)


def rank_pattern(rank: int, device: torch.device) -> Float32[Tensor, " count"]:
    """Return the numbers that a rank adds to the trial sums: integers, so that every order of addition is exact."""
    place = torch.arange(_CHECKED_ELEMENTS, device=device)
    return (place % 251 + (rank % _PATTERN_COUNT) * (place % 13 + 1)).float()


def _expected_total(world: int) -> Float32[Tensor, " count"]:
    """Return the right sum of all ranks' numbers, computed without communication."""
    place = torch.arange(_CHECKED_ELEMENTS)
    kinds = sum(rank % _PATTERN_COUNT for rank in range(world))
    return (world * (place % 251) + kinds * (place % 13 + 1)).float()


def _check_sums(rank: int, world: int, device: torch.device) -> dict[str, WrongNumbers | None]:
    """Return the wrong numbers on this rank, by field of `RankSums`; None for a field without wrong numbers."""
    host = torch.device("cpu")
    ours = rank_pattern(rank, device)
    total = ours.clone()
    dist.all_reduce(total)
    found = {
        "own": _find_wrong_numbers(ours, rank_pattern(rank, host)),
        "total": _find_wrong_numbers(total, _expected_total(world)),
    }
    if world == 1:
        return found | {"link": None, "pair": None}
    theirs = torch.empty_like(ours)
    _exchange_in_ring(rank, world, ours, theirs)
    expected = rank_pattern((rank - 1) % world, host)
    pair = theirs + ours
    return found | {
        "link": _find_wrong_numbers(theirs, expected),
        "pair": _find_wrong_numbers(pair, theirs.to(host) + ours.to(host)),
    }


def _find_wrong_numbers(found: Float32[Tensor, " count"], expected: Float32[Tensor, " count"]) -> WrongNumbers | None:
    differs: Bool[Tensor, " count"] = found.to(expected.device) != expected
    count = int(differs.sum())
    if not count:
        return None
    first = int(differs.nonzero()[0])
    return WrongNumbers(count, first, repr(float(found[first])), float(expected[first]))


def _exchange_in_ring(rank: int, world: int, sent: Tensor, received: Tensor) -> float:
    """Send `sent` to the next rank, and receive the message of the previous rank into `received`. Return the seconds
    that the message took to arrive."""
    seconds, before, group = 0.0, (rank - 1) % world, dist.group.WORLD
    for turn in range(2 + world % 2):
        started = _synchronise_ranks(sent.device)
        if _sending_turn(rank, world) == turn:  # batched sends make NCCL use the communicator that training uses
            _complete_transfer(dist.P2POp(dist.isend, sent, (rank + 1) % world, group))
        elif _sending_turn(before, world) == turn:
            _complete_transfer(dist.P2POp(dist.irecv, received, before, group))
            seconds = time.perf_counter() - started
    return seconds


def _sending_turn(rank: int, world: int) -> int:
    """Return the turn in which a rank sends. No rank sends and receives in the same turn."""
    return 2 if world % 2 and rank == world - 1 else rank % 2


def _complete_transfer(message: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([message]):
        work.wait()
    _wait_for_device(message.tensor.device)


def _time_links(rank: int, world: int, device: torch.device) -> tuple[float, float]:
    """Return the speed of the link from the previous rank, and the speed of this rank's traffic, each way, in a sum
    over all ranks. Both in bytes a second."""
    size = _TIMED_MESSAGE_BYTES[device.type]
    ours, theirs = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)
    fastest = min(_exchange_in_ring(rank, world, ours, theirs) for _ in range(_TIMED_ROUNDS))
    started = _synchronise_ranks(device)
    dist.all_reduce(ours)
    _wait_for_device(device)
    moved = 2 * size * (world - 1) / world
    return size / fastest, moved / (time.perf_counter() - started)


def _synchronise_ranks(device: torch.device) -> float:
    """Wait until all ranks call this, so that a late rank does not make a link look slow. Return the time."""
    dist.all_reduce(torch.zeros(1, device=device))
    _wait_for_device(device)
    return time.perf_counter()


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _link_rate_inside_node(device: torch.device) -> float | None:
    """Return the speed, by the data sheet, of the links between GPUs of this kind in a node, in bytes a second. None if
    it is unknown, as for MIG instances, which do not have the links of the whole GPU."""
    if device.type != "cuda":
        return None
    of = torch.cuda.get_device_properties(device)
    gpu = None if "MIG" in of.name else match_gpu_by_device_name(of.name, of.total_memory)
    return gpu.link if gpu is not None else None
