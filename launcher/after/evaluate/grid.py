"""Computes a grid of cells as Ray tasks. The caller stores each result as its cell ends, so the same command, given
again, computes only the cells without a result. An interrupted cell begins again.

A cell whose process dies is tried again a few times. A cell that fails is reported, and does not stop the others.
"""

import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from data_service.errors import UserError as DataError
from data_service.service.ray_internals import is_cluster_configured
from data_service.service.tasks import death_reason, is_worker_death
from data_service.service.tasks import is_lost_result as gone
from encoder_core.errors import UserError as ModelError
from launcher.after.evaluate.cells import CellFigures, PlannedCell
from launcher.after.finetune.pretrained import LocalModel, model_files
from launcher.errors import OptionError, TransientRunError
from launcher.exit_codes import REPEAT, exit_code_for
from launcher.runtime.cluster.nodes import connect_ray, dead_process, ray_log_folder, request_nodes
from launcher.runtime.cluster.rank_placement import visible_gpu_variables
from launcher.runtime.cluster.rank_process import assigned_gpus
from launcher.runtime.preflight.network import connection_error

_MAX_DEATHS = 3  # number of processes that may die while they compute a cell, before it counts as failed
_POLL_S = 2.0  # seconds between two checks that Ray is alive
_CANCEL_TIMEOUT_S = 5.0  # time limit for cancelled cells to end
_CONNECT_TIMEOUT_S = 10.0  # time limit for connecting to a cluster's head
_OBJECT_STORE_BYTES = 256 << 20  # a local Ray needs a small object store only: its tasks read models from folders
_MAX_TRACE_CHARACTERS = 4000  # a longer traceback is cut at its beginning


@dataclass(frozen=True)
class CellResources:
    """The numbers of cores and GPUs of each cell. With fractions, cells share a core or GPU. `gpus` None: one GPU, if
    the cluster has any."""

    cpus: float = 1.0
    gpus: float | None = None


@dataclass(frozen=True)
class CellFailure:
    """The reason why a cell has no result.

    Attributes:
        is_transient: whether the same command may succeed later.
        trace: traceback of an unexpected error; empty for a UserError.
    """

    problem: str
    remedy: str
    is_transient: bool = False
    trace: str = ""


def compute_cells(
    planned_cells: Sequence[PlannedCell], models: Mapping[str, LocalModel], resources: CellResources
) -> Iterator[tuple[PlannedCell, CellFigures | CellFailure]]:
    """Compute cells on Ray. Yield each cell as it ends, in any order, with its figures, or the reason why it failed.
    `models`: by digest.

    Raises:
        TransientRunError: if there is no cluster, or Ray has died.
        OptionError: if a cell needs more than any machine has.
    """
    with _ray_session(resources, len(planned_cells)) as (remote, settled):
        task = ray.remote(num_cpus=settled.cpus, num_gpus=settled.gpus, max_retries=0)(_compute_cell)
        sent = {digest: [ray.put(_pack_model(model))] if remote else None for digest, model in models.items()}
        node, deaths = ray.get_runtime_context().get_node_id(), Counter[str]()
        running: dict[ray.ObjectRef, PlannedCell] = {}

        def submit_cell(work: PlannedCell) -> None:
            model, packed = models[work.cell.weights], ray.cloudpickle.dumps(work)
            running[task.remote(packed, model, node, sent[model.digest])] = work

        try:
            for work in planned_cells:
                submit_cell(work)
            while running:
                for reference in _wait_for_done(running):
                    work = running.pop(reference)
                    outcome = _cell_outcome(reference, work, deaths)
                    if outcome is None:
                        submit_cell(work)
                    else:
                        yield work, outcome
        finally:
            _cancel_cells(list(running))


def _wait_for_done(running: Mapping["ray.ObjectRef", PlannedCell]) -> list["ray.ObjectRef"]:
    if (part := dead_process()) is not None:
        raise TransientRunError(f"Ray's {part} has died", remedy="run the same command again")
    return list(ray.wait(list(running), timeout=_POLL_S)[0])


def _cell_outcome(
    reference: "ray.ObjectRef", planned_cell: PlannedCell, deaths_by_cell: Counter[str]
) -> CellFigures | CellFailure | None:
    """Return the outcome of a cell that has ended; None if its process died and the cell must be computed again."""
    try:
        found: CellFigures | CellFailure = ray.get(reference)
        return found
    except ray.exceptions.LocalRayletDiedError as error:
        raise TransientRunError("Ray's raylet has died", remedy="run the same command again") from error
    except ray.exceptions.TaskCancelledError:
        return CellFailure(
            f"{planned_cell.cell.name}: it was cancelled", "run the same command again", is_transient=True
        )
    except ray.exceptions.RayError as error:
        if not (gone(error) or is_worker_death(error)):
            return cell_failure(planned_cell, error)
        deaths_by_cell[planned_cell.cell.key] += 1
        if deaths_by_cell[planned_cell.cell.key] < _MAX_DEATHS:
            return None
        return CellFailure(
            f"{planned_cell.cell.name}: {deaths_by_cell[planned_cell.cell.key]} processes died while they "
            "computed it; the last: "
            f"{death_reason(error)}",
            "run fewer cells on a machine: raise --cpus-per-cell or --gpus-per-cell; Ray's logs say what killed them",
        )


def _cancel_cells(running: list["ray.ObjectRef"]) -> None:
    if not running or dead_process() is not None:
        return
    for reference in running:
        ray.cancel(reference)
    _, stuck = ray.wait(running, num_returns=len(running), timeout=_CANCEL_TIMEOUT_S)
    for reference in stuck:
        ray.cancel(reference, force=True)


def _compute_cell(
    packed_cell: bytes, pretrained: LocalModel, driver_node: str, packed_model: "list[ray.ObjectRef] | None"
) -> CellFigures | CellFailure:
    """Compute a cell in a process of Ray. `packed_cell`: the pickled PlannedCell. The model's folder only exists on the
    driver's node. On another node, `packed_model` is unpacked once into the folder of Ray's session."""
    # Ray hides no GPU from a task without GPUs, so hide them here, before unpickling imports torch.
    os.environ.update(visible_gpu_variables(assigned_gpus()))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a cell may use only its own cores
    work: PlannedCell = ray.cloudpickle.loads(packed_cell)
    try:
        if packed_model is not None and ray.get_runtime_context().get_node_id() != driver_node:
            place = ray_log_folder().parent / "maskfleet-models"
            pretrained = _unpack_model(pretrained, ray.get(packed_model[0]), place)
        return work.measure.compute(pretrained, work.cell.seed)
    except Exception as error:
        return cell_failure(work, error)


def cell_failure(planned_cell: PlannedCell, error: Exception) -> CellFailure:
    """Return the failure of a cell whose computation raised `error`."""
    name, trace = planned_cell.cell.name, "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARACTERS:]
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, DataError | ModelError):
        return CellFailure(f"{name}: {error.problem}", error.remedy, is_transient=exit_code_for(error) == REPEAT)
    line = str(error).strip().partition("\n")[0]
    remedy = "see the traceback; if memory ran out, raise --gpus-per-cell or --cpus-per-cell"
    return CellFailure(f"{name}: {type(error).__name__}: {line}", remedy, trace=trace)


def _pack_model(model: LocalModel) -> dict[str, bytes]:
    return {path.relative_to(model.folder).as_posix(): path.read_bytes() for path in model_files(model.folder)}


def _unpack_model(model: LocalModel, files: Mapping[str, bytes], parent_folder: Path) -> LocalModel:
    """Write the model into a folder below `parent_folder`, unless another process has written it there, and return the
    model in that folder."""
    folder = parent_folder / model.digest
    if not folder.exists():
        parent_folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=parent_folder))
        for name, content in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_bytes(content)
        try:
            os.rename(fresh, folder)
        except OSError:
            shutil.rmtree(fresh)
            if not folder.is_dir():  # another process may have created it first
                raise
    return replace(model, folder=folder)


@contextmanager
def _ray_session(cell_resources: CellResources, cell_count: int) -> Iterator[tuple[bool, CellResources]]:
    """Connect to Ray: keep an existing connection, else use RAY_ADDRESS, else start a local Ray. Yield whether it may
    have several machines, and the resources of a cell. An autoscaler is asked for nodes for `cell_count` cells."""
    if ray.is_initialized():
        yield True, _resolve_gpus(cell_resources)
        return
    joined = is_cluster_configured()
    if joined:
        _check_ray_address(os.environ["RAY_ADDRESS"])
    connect_ray(object_store_memory=_OBJECT_STORE_BYTES)
    try:
        cell_resources = _resolve_gpus(cell_resources)
        if not joined and any(
            ray.cluster_resources().get(name, 0.0) < amount for name, amount in _ray_resources(cell_resources)
        ):
            raise OptionError(
                f"--cpus-per-cell {cell_resources.cpus:g} --gpus-per-cell {cell_resources.gpus:g}: "
                "this machine has less",
                remedy="lower --cpus-per-cell or --gpus-per-cell, or name a Ray cluster in RAY_ADDRESS",
            )
        with request_nodes([dict(_ray_resources(cell_resources))] * cell_count) if joined else nullcontext():
            yield joined, cell_resources
    finally:
        ray.shutdown()


def _resolve_gpus(cell_resources: CellResources) -> CellResources:
    """Return the resources with a number of GPUs in place of None."""
    some = ray.cluster_resources().get("GPU", 0.0) > 0
    return CellResources(cell_resources.cpus, float(some) if cell_resources.gpus is None else cell_resources.gpus)


def _ray_resources(cell_resources: CellResources) -> list[tuple[str, float]]:
    return [("CPU", cell_resources.cpus), ("GPU", cell_resources.gpus or 0.0)]


def _check_ray_address(address: str) -> None:
    """Raise TransientRunError if nothing answers at the address. Ray itself would keep trying for many minutes."""
    refused = connection_error(address, _CONNECT_TIMEOUT_S)
    if refused is not None:
        raise TransientRunError(
            f"no Ray cluster answers at RAY_ADDRESS={address}: {refused}",
            remedy="check the address and that the cluster's head is up; unset RAY_ADDRESS to use this machine alone",
        ) from refused
