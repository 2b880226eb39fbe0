"""What ranks find before they train: memory held after a step, the preflight, measured steps. For `run_ranks`."""

import gc
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from checkpoints.gloo_peers import GlooPeers
from encoder_core.batch import Batch, idle_batch
from encoder_core.objectives.modules.losses import LossSums, Term
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import AdamWConfig, MuonConfig
from encoder_core.optim.updates import ALL_PARAMETERS
from encoder_core.train.engine import Engine
from encoder_core.train.settings import EngineConfig, Precision
from launcher.runtime.preflight import collective
from launcher.runtime.preflight.collective import (
    add_sum_findings,
    first_sums,
    preflight,
    problem_and_remedy,
    unfit_reports,
)
from launcher.runtime.preflight.findings import judge_sums
from launcher.runtime.preflight.measure import read_subject

Setting = tuple[Literal[0, 1, 2, 3], Precision]
WIDTH, DEPTH = 512, 8


class Wide(nn.Module):
    """Large against all that is not weights, gradients or optimizer state: DEPTH matrices of WIDTH x WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, batch: Batch) -> LossSums:
        x = torch.ones(1, WIDTH, dtype=next(self.parameters()).dtype)
        for layer in self.layers:
            x = layer(x)
        return LossSums((Term("mlm", x.float().sum(), 1),))


def state_bytes(
    rank: int, world: int, setting: Setting, larger: int, muon: bool = False, decay: float | None = None
) -> int:
    """Bytes of the storages that a step adds and that are there between microbatches, at most.

    Those of less than a matrix over the ranks, and those of `larger` bytes and more, are left out. Once a process:
    nobody knows when an engine's storages go.
    """
    smaller = WIDTH * WIDTH // world
    gc.collect()
    before = _large(smaller, larger)  # a sum: an address that is free again may be taken by what is counted
    model = Wide()
    groups = parameter_groups(model, 0.01, matrices=muon)
    engine = Engine(
        model,
        Muon(groups, MuonConfig(lr=1e-3)) if muon else AdamW(groups, AdamWConfig(lr=1e-3)),
        EngineConfig(*setting, clip=None, persistence_threshold=0 if setting[0] == 3 else None),
        decay,
    )
    most = 0
    for count in (1, 2):  # moments come with the first update
        for last in (False, True):
            engine.begin_update_group(ALL_PARAMETERS)
            losses = engine(idle_batch(torch.device("cpu")))
            engine.backward(losses.terms[0].loss_sum, last=last)
            del losses
            most = max(most, _staying(smaller, larger) - before)
        engine.update(1e-3, count)
    return most


def _staying(smaller: int, larger: int) -> int:
    """`_large`, of what is still there when a further collective is done: gloo's threads let go of what they added up
    a moment after the sum is there."""
    found = []
    for _ in range(3):
        dist.barrier()
        gc.collect()
        found.append(_large(smaller, larger))
    return min(found)


def _large(smaller: int, larger: int) -> int:
    """Bytes of the storages there are, of those of `smaller` bytes and more, but less than `larger`."""
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for size in sizes.values() if smaller <= size < larger)


NODES = ("first", "second", "first")


def hold(rank: int, world: int, run: str, mounted: str | None) -> dict[str, Any]:
    """What a rank hears. Where `mounted` is given, the second node has the run's folder there."""
    what = read_subject(run)
    if mounted is not None and NODES[rank] == "second":
        what = replace(what, run=mounted)
    peers = GlooPeers(dist.new_group(backend="gloo"))
    reports = add_sum_findings(preflight(what, peers, NODES[:world]), first_sums(peers), NODES[:world])
    bad = unfit_reports(reports)
    return {
        "nodes": [report.node for report in reports],
        "checks": [{f.what: f.found for f in report.findings} for report in reports],
        "seconds": max(report.seconds for report in reports),
        "unfit": [report.node for report in bad],
        "problem": problem_and_remedy(bad)[0],
        "event": reports[0].event_fields(),
    }


def faulty_sums(rank: int, world: int, seed: int, examples: int) -> list[dict[str, Any]]:
    """The first sums of ranks on a node each, `examples` times, each time with another fault that all ranks draw alike:
    what it was, and the nodes and texts of all findings that are not ok."""
    peers, draws, nodes = GlooPeers(dist.new_group(backend="gloo")), random.Random(seed), list("abcd"[:world])
    found = []
    for _ in range(examples):
        fault = SumFault(draws.choice(_FAULTS), draws.randrange(world), draws.randrange(1 << 16))
        with fault.strike() if rank == fault.rank else nullcontext():
            told = judge_sums(first_sums(peers), nodes)
        bad = {(node, f.verdict, f.what): f.found for node, all_of in told.items() for f in all_of}
        bad = {key: text for key, text in bad.items() if key[1] != "ok"}
        found.append({"kind": fault.kind, "rank": fault.rank, "number": fault.number, "bad": bad})
    return found


_FAULTS = ("makes", "sends", "hears", "gives", "delays", "none")


@dataclass(frozen=True)
class SumFault:
    """What a rank does wrong: it makes a number wrongly, sends one so, hears a wrong sum, gives a wrong number into the
    sum though its own is right, or sends late. `number`: its place."""

    kind: str
    rank: int
    number: int

    def strike(self) -> AbstractContextManager[Any]:
        match self.kind:
            case "makes":
                made = iter((True,))  # on the device; what it is compared with is right
                right = collective.rank_pattern
                return mock.patch.object(
                    collective, "rank_pattern", lambda *given: self._off(right(*given), next(made, False))
                )
            case "sends" | "delays":
                return mock.patch.object(dist, "batch_isend_irecv", self._send(dist.batch_isend_irecv))
            case "hears" | "gives":
                return mock.patch.object(dist, "all_reduce", self._reduce(dist.all_reduce))
            case _:
                return nullcontext()

    def _off(self, numbers: torch.Tensor, wrong: bool = True) -> torch.Tensor:
        if wrong and numbers.numel() > self.number:
            numbers = numbers.clone()
            numbers[self.number] += 1
        return numbers

    def _send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(messages: list[dist.P2POp]) -> Any:
            for message in messages:
                if message.op is dist.isend and self.kind == "delays":
                    time.sleep(0.2)  # a line on which 2 MiB take so long
                elif message.op is dist.isend:
                    message.tensor = self._off(message.tensor)
            return send(messages)

        return sent

    def _reduce(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def reduced(tensor: torch.Tensor) -> None:
            if self.kind == "gives":
                tensor.copy_(self._off(tensor))
            reduce(tensor)
            if self.kind == "hears":
                tensor.copy_(self._off(tensor))

        return reduced
