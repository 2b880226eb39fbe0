"""`microbatch: auto`: microbatches of as many rows as memory permits, the same on all ranks.

The number first comes from the estimate for the rank with the least memory. It depends only on machines and recipe, so
a run that resumes on the same machines takes the same number. Then trials on the GPUs correct it. Before a step with a
larger microbatch than any before, each rank rehearses the step (`encoder_core/train/rehearsal.py`). If the rehearsal
fails on some rank, all ranks halve the microbatch, and the step begins again. If a step runs out of memory nevertheless
(at ZeRO 3 there is no rehearsal), the ranks end and resume from the last checkpoint with half of the rows. The limits
are stored in the run, so that no later start repeats the failure.

On a CPU nothing is rehearsed: a process that takes too much memory is killed, without an error that it could handle.
"""

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
from pydantic import TypeAdapter, ValidationError

from checkpoints.gather import Peers, broadcast_or_raise, gather_as
from checkpoints.host_memory import available_memory
from data_service.formats import StrictRecord
from data_service.store.errors import KeyMissing
from data_service.stream.positions import StepSampleRanges
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.errors import TrainingError
from encoder_core.train.engine import Engine
from encoder_core.train.rehearsal import Rehearsal
from encoder_core.train.step import Memories, RankBatch
from encoder_core.train.zero_memory import Device
from launcher.output import human_bytes
from launcher.runtime.capacity.devices import usable_gpu_bytes
from launcher.runtime.capacity.memory_fit import RankMemory, rows_that_fit
from launcher.runtime.preflight.collective import installed_versions
from launcher.runtime.preflight.findings import Finding
from launcher.runtime.rank.data import RankData
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import has_automatic_microbatch, with_microbatch_rows
from launcher.runtime.run.record import Run

LIMITS_FOLDER = "microbatch"  # folder of the stored limits in the run
# Share of a machine's memory that all its ranks together may fill; the rest is for other processes.
_CPU_MEMORY_SHARE = 0.5


class SmallerMicrobatch(Exception):
    """The exception that ends a group of ranks because a step did not fit into memory. It is raised after the limit is
    stored, and the next group resumes with smaller microbatches."""


class StoredLimits(StrictRecord):
    """The limits that earlier starts of a run have found. `most`: largest number of rows of a microbatch in each phase;
    None if no number of rows has failed."""

    most: tuple[int | None, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a rank may fill, in bytes, and the kind and the name of its device."""

    bytes: int
    device: Device
    name: str


_DEVICE_MEMORY_ADAPTER = TypeAdapter(DeviceMemory)  # converts a rank's memory for the exchange between ranks
_BOUNDS_ADAPTER: TypeAdapter[tuple[int | None, ...]] = TypeAdapter(tuple[int | None, ...])  # `StoredLimits.most`


def device_memory(ranks: int) -> DeviceMemory:
    """Return the memory that this process may fill, whether or not it is free now. `ranks`: number of ranks that share
    the machine; on GPUs each has its own."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return DeviceMemory(usable_gpu_bytes(found.total_memory), "cuda", found.name)
    return DeviceMemory(int(_CPU_MEMORY_SHARE * available_memory()[1] / ranks), "cpu", "CPU")


def microbatch_finding(recipe: Recipe) -> Finding:
    """Return a finding that states with how many rows `microbatch: auto` begins on this machine: with one rank on each
    GPU, or one rank on the CPU."""
    ranks = max(1, torch.cuda.device_count())
    room = device_memory(ranks)
    most = rows_that_fit(RankMemory.from_recipe(recipe, ranks, room.device), room.bytes)
    rows = ", ".join(map(str, with_microbatch_rows(recipe, ranks, most).microbatch_rows_by_phase))
    each = f"{human_bytes(room.bytes)} of {room.name}"
    return Finding("microbatch", "ok", f"auto: {rows} rows on each of {ranks} rank(s), by the estimate, in {each}")


@dataclass
class MicrobatchLimits:
    """The largest number of rows of a microbatch in each phase of a run on `ranks` ranks.

    Attributes:
        run: the run as it was opened, with `auto` in its recipe.
        room: memory of the rank with the least memory.
        kept: bytes of `room` that are filled all the time.
        estimated: largest number of rows in each phase, by the estimate.
        most: largest number of rows in each phase, corrected by the trials.
    """

    run: Run
    ranks: int
    room: DeviceMemory
    kept: int
    estimated: Sequence[int]
    most: list[int]
    _key: str = field(kw_only=True)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe with numbers in place of `auto`."""
        return with_microbatch_rows(self.run.recipe, self.ranks, self.most)

    def halve(self, phase: int) -> int:
        """Halve the rows of a microbatch of `phase`, which did not fit. Return the new number.

        Raises TrainingError if there is only one row, or the recipe sets the number.
        """
        rows, configured_phase = self.recipe.microbatch_rows_by_phase[phase], self.run.recipe.phases[phase]
        if rows == 1 or not self.run.recipe.is_microbatch_automatic(configured_phase):
            smaller = "set activation_checkpointing: true, a higher zero, or more ranks"
            raise TrainingError(
                f"phases.{phase}: {rows} rows of {configured_phase.length} tokens do not fit into the memory of "
                f"{self.room.name}",
                remedy=smaller if rows == 1 else f"set phases.{phase}.microbatch: auto, or a smaller number",
            )
        self.most[phase] = rows // 2
        return self.recipe.microbatch_rows_by_phase[phase]

    def store_limits(self) -> None:
        """Store the limits in the run. Raises StoreError."""
        given, phases = self.estimated, range(len(self.most))
        most = tuple(self.most[n] if self.most[n] < given[n] else None for n in phases)
        self.run.store.put(self._key, StoredLimits(most=most).model_dump_json().encode())


def agree_on_microbatches(
    run: Run, tokenizer: Tokenizer, peers: Peers, hosts: Sequence[str]
) -> MicrobatchLimits | None:
    """Return the limits, the same on all ranks; None if the recipe sets the rows of a microbatch in every phase.
    Collective. Raises StoreError."""
    if not has_automatic_microbatch(run.recipe):
        return None
    mine = device_memory(hosts.count(socket.gethostname()))
    device_memories = gather_as(peers, _DEVICE_MEMORY_ADAPTER, mine)
    room = min(device_memories, key=lambda room: room.bytes)
    bill = RankMemory.from_recipe(run.recipe, len(hosts), room.device, tokenizer.vocab_size)
    estimated = rows_that_fit(bill, room.bytes)
    key = f"{LIMITS_FOLDER}/{_limits_file_name(run.recipe, device_memories)}.json"
    bounds = broadcast_or_raise(peers, lambda: _stored_limits(run, key), _BOUNDS_ADAPTER) or [None] * len(estimated)
    most = [rows if bound is None else min(rows, bound) for rows, bound in zip(estimated, bounds, strict=True)]
    kept = max(map(bill.fixed_bytes, bill.recipe.phases))
    return MicrobatchLimits(run, len(hosts), room, kept, estimated, most, _key=key)


def _stored_limits(run: Run, key: str) -> tuple[int | None, ...]:
    try:
        return StoredLimits.model_validate_json(run.store.get(key)).most
    except (KeyMissing, ValidationError):  # the limits are found by trials again
        return ()


def _limits_file_name(recipe: Recipe, device_memories: Sequence[DeviceMemory]) -> str:
    fields = {"model", "input", "objective", "phases", "optimizer", "average", "precision", "zero"}
    what = {
        "recipe": recipe.model_dump(mode="json", include=fields | {"reduce_dtype", "activation_checkpointing"}),
        "ranks": list(map(astuple, device_memories)),
        "installed": installed_versions(),
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=10).hexdigest()


@dataclass(frozen=True)
class RankMicrobatches:
    """Corrects the limits on one rank during training (`encoder_core.train.loop.MicrobatchSizer`)."""

    limits: MicrobatchLimits
    rehearsal: Rehearsal | None
    data: RankData
    positions: StepSampleRanges
    journal: RankJournal
    rank: int

    def fits(self, work: RankBatch, memories: Memories) -> bool:
        """Return whether a rehearsal of the step fits into memory; True if there is no rehearsal."""
        return self.rehearsal is None or self.rehearsal.fits(work.microbatches, memories)

    def shrink(self, step: int) -> None:
        """Halve the microbatches from `step` on. Raises SmallerMicrobatch if `step` uses XLNet's memory of the previous
        step, because only the memory in a checkpoint can be divided into other microbatches."""
        phase = self.positions.phase_at_step(step)
        before, rows = self.data.microbatch_rows(step), self.limits.halve(phase)
        if self.rank == 0:
            self.limits.store_limits()
        if self.data.carries_memory(step):
            raise SmallerMicrobatch(_shrink_message(step, before, rows))
        self.data.set_microbatch_rows(phase, rows)
        record_microbatches(self.journal, self.limits, step, f"step {step:,} did not fit with {before} rows")

    def out_of_memory_error(self, step: int, error: RuntimeError) -> Exception:
        """Halve and store the limit of `step`, which ran out of memory. Return the exception that ends the ranks."""
        before, rows = self.data.microbatch_rows(step), self.limits.halve(self.positions.phase_at_step(step))
        self.limits.store_limits()
        return SmallerMicrobatch(f"{_shrink_message(step, before, rows)}: {error}")


def rank_microbatches(
    limits: MicrobatchLimits | None,
    engine: Engine,
    data: RankData,
    positions: StepSampleRanges,
    journal: RankJournal,
) -> RankMicrobatches | None:
    """Return the corrector of `limits` on a rank whose engine is built; None without limits. At ZeRO 3 nothing can be
    rehearsed, because forward passes are collective."""
    if limits is None:
        return None
    rehearsal = None
    if limits.room.device == "cuda" and engine.config.stage < 3:
        rehearsal = Rehearsal(engine, limits.kept)
    return RankMicrobatches(limits, rehearsal, data, positions, journal, engine.rank)


def record_microbatches(journal: RankJournal, limits: MicrobatchLimits, step: int, why: str) -> None:
    """Record the rows of microbatches as an event, and show a line to the operator."""
    rows = list(limits.recipe.microbatch_rows_by_phase)
    journal.event("microbatch", step=step, rows=rows, why=why, room=limits.room.bytes, device=limits.room.name)
    journal.note(f"microbatches of {', '.join(map(str, rows))} rows: {why}")


def limits_origin_text(limits: MicrobatchLimits) -> str:
    """Return a text on how a start chose its number of rows."""
    if list(limits.estimated) == limits.most:
        return "as many as fit by the estimate, shared out evenly"
    return "as many as fitted in earlier starts, shared out evenly"


def _shrink_message(step: int, before: int, rows: int) -> str:
    return f"step {step:,} did not fit into memory with microbatches of {before} rows: continuing with {rows}"
