"""Judges measurements of a machine. Pure functions from a value to a finding with a remedy."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from launcher.output import human_bytes

Verdict = Literal["ok", "warning", "failure"]

_MIB, _GIB = 1 << 20, 1 << 30
_LEAST_FILES, _GOOD_FILES = 1024, 8192  # open files: the minimum, and the number that Ray recommends at least
_DOCKER_SHM_BYTES = 64 * _MIB  # Docker's default size of /dev/shm
_SKEW_WARNING, _SKEW_FAILURE = 5.0, 300.0  # seconds of clock skew; S3 refuses requests from 15 minutes on
_SLOW_LINK_BYTES_S = 100e6  # bytes a second between nodes: 1 Gbit/s, less overhead
# Share of the hardware's rate that a link must reach. Sound links reach about a half (64 MiB over NVLink) or a third (a
# TCP stream over 100 Gbit/s).
_MIN_HARDWARE_SHARE = 0.2
_MIN_MEDIAN_SHARE = 0.25  # share of the other links' median speed that a link must reach


@dataclass(frozen=True)
class Finding:
    """The result of a check; `remedy` is empty if the verdict is ok."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class GpuState:
    """The health of a GPU as the GPU reports it. Fields that it does not report are None.

    Attributes:
        index: number of the GPU in nvidia-smi; None for a GPU that NVML does not list.
        uuid: id of the GPU; empty if it is not reported.
        lost: text of the error if the GPU does not answer; None if it answers.
        uncorrected: number of memory errors that ECC could not correct since the driver was loaded.
        remap_failed: whether a bad row of memory could not be replaced.
        remap_pending: whether a bad row of memory will be replaced at the next reset.
        ecc, persistent: whether ECC and persistence mode are on.
        throttled: current reasons why the hardware slows the GPU down.
    """

    index: int | None
    name: str
    uuid: str = ""
    lost: str | None = None
    uncorrected: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    ecc: bool | None = None
    persistent: bool | None = None
    throttled: tuple[str, ...] = ()


def judge_clock(skew_s: float | None) -> Finding:
    """Judge this machine's clock. `skew_s`: seconds that it is ahead of the store's clock; None if the store has no
    clock of its own."""
    if skew_s is None:
        return Finding("clock", "ok", "the store is a folder: no other clock to compare with")
    found = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the store's"
    remedy = "start an NTP client (chrony): a store refuses requests whose clock is minutes off"
    if abs(skew_s) >= _SKEW_FAILURE:
        return Finding("clock", "failure", found, remedy)
    if abs(skew_s) >= _SKEW_WARNING:
        return Finding("clock", "warning", found, remedy)
    return Finding("clock", "ok", found)


def judge_shared_memory(total: int, free: int, gpus: int) -> Finding:
    """Judge the size of /dev/shm, in bytes: NCCL connects a machine's ranks through it, and Ray keeps batches in it."""
    found = f"{human_bytes(free)} free of {human_bytes(total)}"
    remedy = "in a container: --shm-size=8g, or an emptyDir of medium Memory on /dev/shm"
    if gpus > 1 and total <= _DOCKER_SHM_BYTES:
        return Finding("/dev/shm", "failure", found, f"NCCL needs more: {remedy}")
    if free < _GIB:
        return Finding("/dev/shm", "warning", found, f"Ray falls back to slow disk: {remedy}")
    return Finding("/dev/shm", "ok", found)


def judge_open_files(soft: int, hard: int) -> Finding:
    """Judge the limits on open files of this process; -1 is no limit (RLIM_INFINITY)."""
    if soft < 0:
        return Finding("open files", "ok", "no limit")
    found = f"{soft:,} (at most {f'{hard:,}' if hard >= 0 else 'without limit'})"
    if soft >= _GOOD_FILES:
        return Finding("open files", "ok", found)
    verdict: Verdict = "warning" if soft >= _LEAST_FILES else "failure"
    return Finding(
        "open files", verdict, found, f"raise the limit to {_GOOD_FILES:,} (ulimit -n): Ray opens many files"
    )


def judge_memory(available: int, total: int, wanted: int = 4 * _GIB) -> Finding:
    """Judge the available memory of this machine or container, in bytes."""
    found = f"{human_bytes(available)} free of {human_bytes(total)}"
    if available >= wanted:
        return Finding("memory", "ok", found)
    remedy = f"training needs {human_bytes(wanted)} free: lower data_service.memory, or use larger machines"
    return Finding("memory", "warning", found, remedy)


def judge_temporary_disk(free: int, folder: str) -> Finding:
    """Judge the free bytes of `folder`, where Ray spills objects that do not fit into memory."""
    found = f"{human_bytes(free)} free in {folder}"
    if free >= 5 * _GIB:
        return Finding("temporary disk", "ok", found)
    return Finding("temporary disk", "warning", found, "set TMPDIR to a larger disk")


def judge_checkpoint_disk(free: int, folder: str, checkpoint: int, kept: int) -> Finding:
    """Judge the free bytes of a local disk that must hold `kept` checkpoints of `checkpoint` bytes each, and one more
    while it is written."""
    found = f"{human_bytes(free)} free in {folder}, a checkpoint takes {human_bytes(checkpoint)}"
    if free < checkpoint:
        return Finding("checkpoints' disk", "failure", found, "free space, or move the run to a larger disk")
    if free < checkpoint * (kept + 1):
        return Finding("checkpoints' disk", "warning", found, f"free space for the {kept} checkpoints of keep_last")
    return Finding("checkpoints' disk", "ok", found)


def missing_gpu_finding(torch: str, cuda: str | None) -> Finding:
    """Return the finding for a user who asks about GPUs where torch finds none. `torch`: its version. `cuda`: version
    of CUDA with which torch was built; None for a build without CUDA."""
    if cuda is None:
        remedy = "install torch's wheel with CUDA, as README's installation does"
        return Finding("GPUs", "warning", f"none: torch {torch} was built without CUDA", remedy)
    remedy = "if the machine has a GPU that nvidia-smi does not list, install NVIDIA's driver"
    return Finding("GPUs", "warning", f"none: torch {torch} finds no device for CUDA {cuda}", remedy)


def judge_gpu(state: GpuState) -> Iterator[Finding]:
    """Yield a finding for each defect of a GPU; a single ok if there is none."""
    what = f"GPU {state.uuid if state.index is None else state.index}"
    name = f"{state.name} ({state.uuid})" if state.uuid and state.index is not None else state.name
    if state.lost is not None:
        remedy = "reset the GPU or reboot the node; see the error in nvidia-smi and dmesg (Xid)"
        yield Finding(what, "failure", f"{name}: {state.lost}", remedy)
        return
    ailments = list(_gpu_problems(state))
    for verdict, text, remedy in ailments:
        yield Finding(what, verdict, f"{name}: {text}", remedy)
    if not ailments:
        yield Finding(what, "ok", state.name)


def _gpu_problems(state: GpuState) -> Iterator[tuple[Verdict, str, str]]:
    if state.remap_failed:
        yield "failure", "a bad row of its memory could not be remapped", "have the GPU replaced"
    if state.remap_pending:
        yield "warning", "a bad row of its memory waits to be remapped", "reset it when the node is idle"
    if state.uncorrected:
        yield (
            "warning",
            f"{state.uncorrected} uncorrected memory errors",
            "reset the GPU; replace it if more errors come",
        )
    if state.ecc is False:
        yield "warning", "ECC is off: bits flip unnoticed", "nvidia-smi -e 1, and reboot the node"
    if state.persistent is False:
        yield "warning", "persistence mode is off", "nvidia-smi -pm 1, or run nvidia-persistenced"
    if state.throttled:
        yield "warning", f"slowed down: {', '.join(state.throttled)}", "look at its cooling and its power"


@dataclass(frozen=True)
class WrongNumbers:
    """Wrong numbers in a trial sum: how many; index, value and true value of the first."""

    count: int
    first: int
    found: str
    expected: float

    def __str__(self) -> str:
        return f"{self.count:,} wrong; number {self.first:,} is {self.found}, not {self.expected!r}"


@dataclass(frozen=True)
class RankSums:
    """The results of a rank in the trial sums of its group. Speeds are in bytes a second, and None in a group of one.

    Attributes:
        own: wrong numbers among the numbers that its device computed.
        link: wrong numbers among the numbers from the previous rank, in a ring of all ranks.
        pair: wrong numbers in the sum of the previous rank's numbers and its own, computed on its device.
        total: wrong numbers in the sums over all ranks.
        speed: speed of the link from the previous rank.
        together: speed of this rank's traffic, each way, in a sum over all ranks.
        inside: speed that the hardware's links between GPUs of a node should have; None if unknown.
        line: speed that the network line between nodes should have; None if unknown.
        seconds: time that the sums took.
    """

    own: WrongNumbers | None
    link: WrongNumbers | None
    pair: WrongNumbers | None
    total: WrongNumbers | None
    speed: float | None = None
    together: float | None = None
    inside: float | None = None
    line: float | None = None
    seconds: float = 0.0


def judge_sums(rank_sums: Sequence[RankSums], nodes: Sequence[str]) -> dict[str, list[Finding]]:
    """Judge the trial sums. Return the findings of each node. `rank_sums`, `nodes`: results and node of each rank. A
    node is named in findings as it is in `nodes`."""
    wrong = list(_wrong_sum_findings(rank_sums, nodes))
    findings: dict[str, list[Finding]] = {node: [f for at, f in wrong if at == node] for node in nodes}
    for node in findings:
        mine = [one for one, at in zip(rank_sums, nodes, strict=True) if at == node]
        if not findings[node]:
            slowest = min((one.together for one in mine if one.together is not None), default=None)
            text = "right" if slowest is None else f"right, {human_bytes(slowest)}/s each way"
            findings[node].append(Finding("sums", "ok", text))
    for rank, one in enumerate(rank_sums):
        if one.speed is not None:
            findings[nodes[rank]].append(_link_speed_finding(rank, rank_sums, nodes))
    return {node: _worst_findings(all_of) for node, all_of in findings.items()}


def _wrong_sum_findings(found: Sequence[RankSums], nodes: Sequence[str]) -> Iterator[tuple[str, Finding]]:
    """Yield failures with the nodes at fault. If no node is known to be at fault, yield one for each wrong sum."""
    blamed = False
    for rank, one in enumerate(found):
        before = rank - 1 if rank else len(found) - 1
        if one.own or one.pair:
            what = f"its own numbers: {one.own}" if one.own else f"its sums of two: {one.pair}"
            yield nodes[rank], _sum_failure(f"rank {rank} computes wrongly, {what}", "have its GPU or memory tested")
            blamed = True
        elif one.link and not found[before].own:
            link = _link_text(before, rank, nodes)
            for node in dict.fromkeys((nodes[before], nodes[rank])):  # either end of the link may be at fault
                yield (
                    node,
                    _sum_failure(f"from {link}: {one.link}", "test cables, network cards and GPUs of this link"),
                )
            blamed = True
    if blamed:
        return
    for rank, one in enumerate(found):  # no node is known to be at fault: report each rank with a wrong sum
        if one.total:
            remedy = "sums over this network are wrong: compare NCCL's versions and settings; test GPUs and links"
            yield nodes[rank], _sum_failure(f"rank {rank}'s sums over all ranks: {one.total}", remedy)


def _sum_failure(text: str, remedy: str) -> Finding:
    return Finding("sums", "failure", text, remedy)


def _link_text(before: int, rank: int, nodes: Sequence[str]) -> str:
    if nodes[before] == nodes[rank]:
        return f"rank {before} to rank {rank}"
    return f"rank {before} ({nodes[before]}) to rank {rank} ({nodes[rank]})"


def _link_speed_finding(rank: int, found: Sequence[RankSums], nodes: Sequence[str]) -> Finding:
    """Judge the speed of the link from the previous rank, compared with the hardware and with the other links."""
    before, speed = rank - 1 if rank else len(found) - 1, found[rank].speed
    assert speed is not None
    crosses = nodes[before] != nodes[rank]
    what = "network" if crosses else "links"
    text = f"{human_bytes(speed)}/s from {_link_text(before, rank, nodes)}"
    hardware = found[rank].line if crosses else found[rank].inside
    if hardware is not None:
        text += f", of {human_bytes(hardware)}/s"
    others = [
        one.speed
        for place, one in enumerate(found)
        if place != rank and one.speed is not None and (nodes[place - 1] != nodes[place]) == crosses
    ]
    usual = median(others) if len(others) > 1 and (crosses or hardware is not None) else 0.0
    if usual * _MIN_MEDIAN_SHARE > speed:
        text += f"; others {human_bytes(usual)}/s"
    if speed >= max(
        (hardware or 0.0) * _MIN_HARDWARE_SHARE,
        usual * _MIN_MEDIAN_SHARE,
        _SLOW_LINK_BYTES_S if crosses else 0.0,
    ):
        return Finding(what, "ok", text)
    remedy = (
        "gradients cross this link in each step: look for a slow line, and check GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME"
        if crosses
        else "check whether NCCL uses the fastest link between these GPUs (NCCL_DEBUG=INFO, nvidia-smi topo -m, "
        "nvidia-smi nvlink -s)"
    )
    return Finding(what, "warning", text, remedy)


def _worst_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return all findings that are not ok; for each kind with only ok findings, return the first."""
    bad = {f.what for f in findings if f.verdict != "ok"}
    first = {f.what: f for f in reversed(findings) if f.verdict == "ok" and f.what not in bad}
    return [f for f in findings if f.verdict != "ok" or first.get(f.what) is f]


def judge_versions(nodes: Mapping[str, Mapping[str, str]]) -> dict[str, list[Finding]]:
    """Compare the installed versions of nodes, because ranks must run the same code. Return, for each node, a failure
    for every version that differs from that of most nodes."""
    found: dict[str, list[Finding]] = {node: [] for node in nodes}
    for name in sorted({name for installed in nodes.values() for name in installed}):
        have = {node: installed.get(name, "none") for node, installed in nodes.items()}
        (usual, count), *_ = Counter(have.values()).most_common()
        for node, version in have.items() if count < len(have) else ():
            # If no version has a majority of the nodes, none counts as right.
            if version != usual or 2 * count <= len(have):
                text = f"{version}; all nodes: {', '.join(sorted(set(have.values())))}"
                found[node].append(Finding(name, "failure", text, "use the same image on all nodes"))
    return found


def worst_verdict(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; ok if there are no findings."""
    found = {finding.verdict for finding in findings}
    return "failure" if "failure" in found else "warning" if "warning" in found else "ok"
