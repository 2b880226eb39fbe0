"""Ranks on nodes that are not: three processes say that they are on two nodes, and hold their preflight."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from checkpoints.gather import GlooPeers
from launcher.preflight.collective import preflight, problem, unfit
from launcher.preflight.measure import subject

NODES = ("first", "second", "first")


def hold(rank: int, world: int, run: str, mounted: str | None) -> dict[str, Any]:
    """What a rank hears. Where `mounted` is given, the second node has the run's folder there."""
    what = subject(run)
    if mounted is not None and NODES[rank] == "second":
        what = replace(what, run=mounted)
    group = dist.new_group(backend="gloo")
    reports = preflight(what, GlooPeers(group), group, NODES[:world])
    bad = unfit(reports)
    return {
        "nodes": [report.node for report in reports],
        "checks": [{f.what: f.found for f in report.findings} for report in reports],
        "seconds": max(report.seconds for report in reports),
        "unfit": [report.node for report in bad],
        "problem": problem(bad)[0],
        "event": reports[0].event(),
    }
