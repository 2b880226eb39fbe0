"""The preflight of a group of ranks: one rank of each node examines its node, all reports are exchanged, and all ranks
agree on which nodes are unfit. Nodes whose examination found nothing against them sum known numbers
(`launcher.runtime.preflight.sums`), since what it does find, too little shared memory or other versions, makes NCCL
hang.

Nodes are compared by the code that they run: versions of the libraries that compute, and a hash of our own sources.
"""

import hashlib
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from pydantic import TypeAdapter

from checkpoints.gather import Peers
from launcher.runtime.preflight import findings
from launcher.runtime.preflight.findings import Finding, RankSums, Verdict, worst
from launcher.runtime.preflight.measure import PreflightSubject, examine

_LIBRARIES = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "safetensors")
_ROOT = Path(__file__).parents[3]
_PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")


def installed() -> dict[str, str]:
    """By name. NCCL only where there are GPUs."""
    found = {
        "python": platform.python_version(),
        "maskfleet": f"{metadata.version('maskfleet')}+{source_digest()}",
    }
    found |= {name: metadata.version(name) for name in _LIBRARIES}
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": _nccl()}
    return found


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def source_digest() -> str:
    """Of our own code."""
    digest = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class NodeReport:
    """What one node found about itself.

    Attributes:
        node: as the launcher knows it. `host`: its name.
        seconds: that it took.
        versions: what is installed.
    """

    node: str
    host: str
    seconds: float
    findings: tuple[Finding, ...]
    versions: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def bad(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]

    def event(self) -> dict[str, object]:
        """Fields of the `preflight` event."""
        problems = [f"{f.what}: {f.found}" for f in self.findings if f.verdict != "ok"]
        checks = {f.what: f.found for f in self.findings}
        head = {"node": self.node, "host": self.host, "verdict": self.verdict, "seconds": self.seconds}
        return {**head, "problems": problems, "checks": checks, "versions": self.versions}


_REPORT = TypeAdapter(NodeReport | None)


class Unfit(Exception):
    """Nodes of this group must not train. The same on all ranks."""


def preflight(subject: PreflightSubject, peers: Peers, nodes: Sequence[str]) -> list[NodeReport]:
    """Collective. `nodes`: where each rank is. One report for each node, in order of its first rank."""
    leader = nodes.index(nodes[peers.rank]) == peers.rank
    report = _report(subject, nodes[peers.rank]) if leader else None
    answers = peers.all_gather(_REPORT.dump_python(report, mode="json"))
    reports = [report for answer in answers if (report := _REPORT.validate_python(answer)) is not None]
    return with_versions(reports)


def unfit(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """The reports of nodes on which no rank may train."""
    return [report for report in reports if report.verdict == "failure"]


def problem(reports: Sequence[NodeReport]) -> tuple[str, str]:
    """What is wrong with unfit nodes, and what to do about it."""
    wrong = [(report, finding) for report in reports for finding in report.bad("failure")]
    texts = [f"node {report.node[:8]} ({report.host}): {f.what}: {f.found}" for report, f in wrong]
    return "; ".join(texts), "; ".join(dict.fromkeys(finding.remedy for _, finding in wrong))


def warnings(reports: Sequence[NodeReport]) -> list[str]:
    """Lines for the operator; what several nodes have alike, once."""
    found: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for finding in report.bad("warning"):
            text = (f"{finding.what}: {finding.found}", finding.remedy)
            found.setdefault(text, []).append(report.host)
    return [f"preflight, {', '.join(hosts)}: {what} ({remedy})" for (what, remedy), hosts in found.items()]


def with_versions(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """The reports, each with a finding if its node has another version of something than most nodes."""
    differing: Mapping[str, list[Finding]] = findings.versions({r.node: r.versions for r in reports})
    return [
        NodeReport(r.node, r.host, r.seconds, (*r.findings, *differing[r.node]), r.versions) for r in reports
    ]


def with_sums(
    reports: Sequence[NodeReport], found: Sequence[RankSums], nodes: Sequence[str]
) -> list[NodeReport]:
    """The reports, with what the ranks' first sums told of each node. `found` and `nodes`: of each rank."""
    told = findings.sums(found, nodes)
    took = max(one.seconds for one in found)
    return [
        NodeReport(r.node, r.host, r.seconds + took, (*r.findings, *told[r.node]), r.versions)
        for r in reports
    ]


def _report(subject: PreflightSubject, node: str) -> NodeReport:
    started = time.monotonic()
    found, host, versions = tuple(examine(subject)), socket.gethostname(), installed()
    return NodeReport(node, host, time.monotonic() - started, found, versions)
