"""Computes a grid of cells as stateless Ray tasks. A cell whose process dies is computed again; a cell that fails is
named, and the others are kept.

The driver starts tasks and sees only how they end: a result is stored by the task itself. A cell that a process of
another command computes, or that may still be alive elsewhere, is left alone until that is settled.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import ray

from checkpoints.attempt import Owner
from data_service.service.ray_internals import joins_cluster
from data_service.service.tasks import died, reason_of
from data_service.service.tasks import lost as gone
from data_service.store.errors import TRANSIENT, StoreError
from launcher.after.evaluate.cell import CellWork, Results
from launcher.after.evaluate.compute_cell import (
    BREAKS,
    DEATHS,
    CellFailure,
    CellResources,
    Ended,
    Waiting,
    compute,
    failure_of,
    holder,
    killed,
)
from launcher.after.evaluate.model import pack, unpack
from launcher.after.finetune.pretrained import LocalModel
from launcher.errors import OptionError, TryAgain
from launcher.runtime.cluster.nodes import connect, logs, lost, room_for
from launcher.runtime.cluster.rank_placement import seeing
from launcher.runtime.cluster.rank_process import given_gpus
from launcher.runtime.preflight.network import refusal

_POLL_S = 2.0  # between two looks at what the cluster has
_LOOK_S = 6.0  # between two looks at what other commands compute: each asks the store for every such cell
_STOP_S = 5.0  # for a cell to end that is told to
_ANSWER_S = 10.0  # for a cluster's head to take a connection
_OBJECT_STORE = 256 << 20  # bytes, of a Ray started here: tasks return nothing, and read the driver's folders


class GridRunner:
    """A runner that computes cells on the Ray cluster to which this process is connected (`cluster`).

    Args:
        models: folders of the checkpoints on this machine, by digest.
        remote: whether the cluster may have other machines, to which checkpoints must be sent.
    """

    def __init__(
        self,
        results: Results,
        share: CellResources,
        *,
        models: Mapping[str, LocalModel],
        remote: bool,
    ) -> None:
        self._results, self._share = results, share
        self._models = models
        self._sent = {digest: [ray.put(pack(model))] for digest, model in models.items()} if remote else {}
        self._task = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0)(_compute)
        self._node = ray.get_runtime_context().get_node_id()
        self._waiting: deque[CellWork] = deque()
        self._running: dict[ray.ObjectRef, CellWork] = {}
        self._elsewhere: dict[str, CellWork] = {}
        self._deaths, self._breaks = Counter[str](), Counter[str]()
        self._looked, self._told_elsewhere = time.monotonic(), False
        self.trouble: StoreError | None = None

    def run(self, works: Sequence[CellWork]) -> Iterator[Ended | Waiting]:
        """Compute the cells, and yield each as it ends, in any order.

        If the store does not answer for longer than its time limit, no further cell is started, and `trouble` says why;
        the running cells continue to their end.

        Raises TryAgain if Ray itself has died.
        """
        self._waiting.extend(works)
        told = False
        try:
            while self._running or (self.trouble is None and (self._waiting or self._elsewhere)):
                self._submit()
                if self._waiting and not self._running and not told:
                    told = True
                    yield Waiting(len(self._waiting), "no machine of the cluster has room for a cell yet")
                yield from self._collect()
                yield from self._look_elsewhere()
        finally:
            self._stop()

    def _submit(self) -> None:
        """Start as many cells as there is room for, and one more, so that no core is idle between two looks."""
        room = _room(self._share)
        while self._waiting and room and len(self._running) <= room and self.trouble is None:
            work = self._waiting.popleft()
            model = self._models[work.cell.weights]
            sent = self._sent.get(model.digest)
            packed = ray.cloudpickle.dumps(work)
            reference = self._task.remote(packed, model, self._node, sent, self._results.store.uri)
            self._running[reference] = work

    def _collect(self) -> Iterator[Ended | Waiting]:
        """Wait for some seconds, and yield the cells that end in this time."""
        if (part := lost()) is not None:
            raise _ray_died(part)
        if not self._running:
            threading.Event().wait(_POLL_S)
            return
        done, _ = ray.wait(list(self._running), timeout=_POLL_S)
        for reference in done:
            work = self._running.pop(reference)
            try:
                answer = ray.get(reference)
            except ray.exceptions.LocalRayletDiedError as error:
                raise _ray_died("raylet") from error
            except ray.exceptions.RayError as error:
                failure = self._judge(work, error)
                if failure is None:
                    self._waiting.appendleft(work)
                else:
                    yield Ended(work, failure)
            else:
                yield from self._ended(work, answer)

    def _ended(self, work: CellWork, answer: bool | Owner) -> Iterator[Ended | Waiting]:
        if not isinstance(answer, Owner):
            yield Ended(work, None, computed=answer)
            return
        self._elsewhere[work.cell.key] = work
        if not self._told_elsewhere:
            self._told_elsewhere = True
            who = f"process {answer.pid} on host {answer.host}"
            yield Waiting(
                1, f"{work.cell.name}: {who} computes it, or has died just now; such cells are waited for"
            )

    def _judge(self, work: CellWork, error: Exception) -> CellFailure | None:
        """Return the failure of a cell; None if the cell must be computed again."""
        if gone(error):
            return None
        key = work.cell.key
        if died(error):
            self._deaths[key] += 1
            return killed(work, reason_of(error)) if self._deaths[key] == DEATHS else None
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None:
            cause = cause.cause
        failure = failure_of(work, cause)
        if isinstance(cause, TRANSIENT):
            self.trouble = self.trouble or cause
        self._breaks[key] += bool(failure.trace)
        return None if failure.trace and self._breaks[key] < BREAKS else failure

    def _look_elsewhere(self) -> Iterator[Ended]:
        """Take the results that other commands have stored. Cells that no process computes any more, and that have no
        result, are computed here."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            for key, work in list(self._elsewhere.items()):
                if self._results.find(key) is not None:
                    del self._elsewhere[key]
                    yield Ended(work, None, computed=False)
                elif holder(self._results.store, key) is None:
                    del self._elsewhere[key]
                    self._waiting.append(work)
        except TRANSIENT as error:
            self.trouble = self.trouble or error

    def _stop(self) -> None:
        """Ask running tasks to end, so that they release their cells; kill those that do not within seconds."""
        if not self._running or lost() is not None:
            return
        running = list(self._running)
        for reference in running:
            ray.cancel(reference)
        _, stuck = ray.wait(running, num_returns=len(running), timeout=_STOP_S)
        for reference in stuck:
            ray.cancel(reference, force=True)


def _ray_died(part: str) -> TryAgain:
    return TryAgain(f"Ray's {part} has died", remedy="run the same command again")


def _compute(
    packed: bytes, pretrained: LocalModel, node: str, sent: "list[ray.ObjectRef] | None", results: str
) -> bool | Owner:
    """Compute a cell in a process of Ray. `packed`: the CellWork. The driver's folder only exists on the driver's node;
    on other nodes the checkpoint is unpacked once into the folder of Ray's session, and is deleted with it."""
    # Ray hides no GPU from a task that asks for none. Modules that come with the work ask CUDA, which answers once.
    os.environ.update(seeing(given_gpus()))
    work: CellWork = ray.cloudpickle.loads(packed)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a cell has the cores that it was given
    place = logs().parent / "maskfleet-models"
    if sent is not None and ray.get_runtime_context().get_node_id() != node:
        pretrained = unpack(ray.get(sent[0]), place)
    return compute(work, pretrained, results, place)


def _room(share: CellResources) -> int:
    """Return how many cells the cluster's machines hold at once."""
    return sum(_fits(node["Resources"], share) for node in ray.nodes() if node["Alive"])


def _with_gpus(share: CellResources) -> CellResources:
    some = ray.cluster_resources().get("GPU", 0.0) > 0
    return CellResources(share.cpus, float(some) if share.gpus is None else share.gpus)


def _fits(resources: Mapping[str, float], share: CellResources) -> int:
    asked = (("CPU", share.cpus), ("GPU", share.gpus))
    return min(int(resources.get(name, 0.0) / amount + 1e-6) for name, amount in asked if amount)


@contextmanager
def cluster(share: CellResources, cells: int) -> Iterator[tuple[bool, CellResources]]:
    """The cluster that this process is connected to, else the one RAY_ADDRESS names, else one of its own: whether it
    may have other machines, and the share of a cell there. An autoscaler is asked for room for `cells` cells.

    Raises:
        OptionError: a Ray of its own, and a cell wants more than this machine has.
        TryAgain: no cluster answers at RAY_ADDRESS.
    """
    if ray.is_initialized():
        yield True, _with_gpus(share)
        return
    joined = joins_cluster()
    if joined:
        _check_address(os.environ["RAY_ADDRESS"])
    connect(object_store_memory=_OBJECT_STORE)
    try:
        share = _with_gpus(share)
        if not joined and not _room(share):
            raise OptionError(
                f"--cpus-per-cell {share.cpus:g} --gpus-per-cell {share.gpus:g}: this machine has less",
                remedy="ask for less, or name a Ray cluster in RAY_ADDRESS",
            )
        wanted = [{"CPU": share.cpus, "GPU": share.gpus or 0.0}] * cells
        with room_for(wanted) if joined else nullcontext():
            yield joined, share
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise TryAgain if nothing answers at the address. Ray itself would try for many minutes."""
    refused = refusal(address, _ANSWER_S)
    if refused is not None:
        raise TryAgain(
            f"no Ray cluster answers at RAY_ADDRESS={address}: {refused}",
            remedy="check the address and that the cluster's head is up; unset RAY_ADDRESS to use this machine alone",
        ) from refused
