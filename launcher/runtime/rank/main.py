"""One rank from start to end: it agrees with the others on a checkpoint, builds the model, loads it, and trains.
Independent of Ray."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.metadata import version
from itertools import count

import torch
from jaxtyping import Float32
from torch import Tensor

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers
from checkpoints.load import ensure_same_optimizer
from data_service.samples.spec import StreamSpec
from data_service.stream.positions import StepSampleRanges
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.pieces import Pieces, compile_layers
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.optim.average import AVERAGE
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.groups import abort_groups_on_error
from encoder_core.train.loop import Trainer
from encoder_core.train.rehearsal import sums_are_verified, verified_rank_count, verify_gradient_sums
from encoder_core.train.state import TrainState
from encoder_core.train.step import Memories
from encoder_core.train.weight_check import CorruptReplica
from encoder_core.train.xlnet_memory import restore_memory
from encoder_core.train.zero_state import ALL_KINDS, MASTER
from launcher.errors import RunError
from launcher.runtime.policies.stragglers import StragglerDetector
from launcher.runtime.preflight.collective import NodeReport
from launcher.runtime.preflight.kernels import KernelVerdict
from launcher.runtime.preflight.releases import describe_torch_change, untested_torch_warning
from launcher.runtime.rank.build import (
    attach_teachers,
    build_model,
    build_optimizer,
    engine_config,
    set_determinism,
    training_plan,
)
from launcher.runtime.rank.checkpointing import MemoryCopies, RunCheckpointer
from launcher.runtime.rank.data import HeldOutText, RankData, RankShard, SampleStream
from launcher.runtime.rank.initial_weights import InitialWeights, initial_weights
from launcher.runtime.rank.journal import RankJournal, SupervisorLink, run_utilisation
from launcher.runtime.rank.kernels import (
    CompilationRecord,
    agree_on_compilation,
    agree_on_kernels,
    record_compilation,
    record_kernels,
)
from launcher.runtime.rank.microbatch_size import (
    MicrobatchLimits,
    agree_on_microbatches,
    limits_origin_text,
    rank_microbatches,
    record_microbatches,
)
from launcher.runtime.rank.resume import MemorySets, ResumePoint, agree_on_removals, find_resume_point, missing_records
from launcher.runtime.rank.spike_guard import SpikeGuard
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run.kept_tokenizer import cached_tokenizer
from launcher.runtime.run.log import RunLog
from launcher.runtime.run.metrics import BEFORE_PREFIX
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import (
    SkippedData,
    before_text_specs,
    heldout_specs,
    read_skipped_data,
    sample_positions,
    stream_spec,
)

OpenStream = Callable[[StreamSpec], SampleStream]


def run_rank(
    run: Run,
    attempt: Attempt,
    control: RankGroup,
    peers: Peers,
    open_stream: OpenStream,
    link: SupervisorLink,
    startup: StartupClock,
    reports: Sequence[NodeReport] = (),
    memory: MemorySets | None = None,
) -> TrainState:
    """Train this rank's part of `run` until the run is complete or a stop is requested, and commit the result.

    `startup` and `reports` (the results of the nodes' preflight) are recorded. `memory`: access to the memory of nodes,
    to which states are copied and from which the run may resume.

    Raises:
        NoGoodCheckpoint, RunError: if there is no checkpoint to resume from, though the run had begun.
        Superseded: if a newer attempt of the run has been claimed.
        Rewound: if the loss spiked, and the run must resume from an earlier checkpoint.
        SmallerMicrobatch: if a step did not fit into memory, and the next start has smaller microbatches.
        UserError: subclasses of the packages that are used, for example if data are damaged or a store does not answer.
    """
    with ExitStack() as ending, abort_groups_on_error():
        # Agree with the other ranks on the checkpoint to resume from.
        link.beat(0, "starting")
        hosts = [str(host) for host in peers.all_gather(socket.gethostname())]
        _set_up_torch(hosts, run.recipe.deterministic)
        tokenizer = cached_tokenizer(run.store, run.record.inputs.tokenizer, run.recipe)
        good = find_resume_point(run, peers, link, memory)
        startup.end_part("checkpoint")
        run, limits, verdicts, (pieces, compilation) = _agree_on_settings(run, tokenizer, peers, link, hosts)
        startup.end_part("kernels")
        # Build the model and its optimizer; load the checkpoint or the initial weights.
        model, engine, begin = _build_engine(run, tokenizer, peers, good, pieces)
        ending.callback(engine.close)
        startup.end_part("model")
        state = _load_state(run, engine, good, begin, link)
        startup.end_part("load")
        # Open the journal, and record how this start begins.
        journal = _open_journal(run, attempt, control, link, startup, hosts, tokenizer, engine)
        ending.callback(journal.close)
        _record_start(run, journal, state, good, begin, control, (reports, verdicts, limits, compilation))
        run = _leave_out_removed(run, attempt, state, peers, journal)
        resumed = good.manifest if good else None
        lost = read_skipped_data(run, resumed, peers)
        data, positions, share = _open_data(run, tokenizer, open_stream, lost, model, engine, control)
        ending.callback(data.close)
        # Train to the end, or until a stop is requested.
        guard = SpikeGuard(run, attempt, control, peers, journal, positions, resumed, lost)
        checkpointer = _make_checkpointer(run, attempt, peers, journal, guard, good)
        ending.callback(checkpointer.close)
        copies = MemoryCopies(run, attempt, peers, keeper=memory, extra=guard, journal=journal, resumed=good)
        ending.callback(copies.close)
        memories = _restore_memories(run, engine, good, data, share)
        microbatches = rank_microbatches(limits, engine, data, positions, journal)
        parts = (engine, control, data, checkpointer, guard, journal, training_plan(run.recipe))
        trainer = Trainer(*parts, link.stop_requested, memories, microbatches, copies)
        startup.end_part("data")
        return _train(trainer, state, journal, hosts)


def _agree_on_settings(
    run: Run, tokenizer: Tokenizer, peers: Peers, link: SupervisorLink, hosts: Sequence[str]
) -> tuple[Run, MicrobatchLimits | None, Sequence[KernelVerdict], tuple[Pieces | None, CompilationRecord | None]]:
    """Decide with the other ranks the settings that depend on the machines: rows of a microbatch, kernels, compiled
    layers. Return the run with these rows, and the decisions."""
    limits = agree_on_microbatches(run, tokenizer, peers, hosts)
    run = run if limits is None else replace(run, recipe=limits.recipe)
    verdicts = agree_on_kernels(run, tokenizer, peers, link)
    return run, limits, verdicts, agree_on_compilation(run, tokenizer, peers, link, hosts[peers.rank])


def _train(trainer: Trainer, state: TrainState, journal: RankJournal, hosts: Sequence[str]) -> TrainState:
    """Train. If a weight check finds wrong weights, record on which ranks, and raise CorruptReplica."""
    try:
        return trainer.train(state)
    except CorruptReplica as found:
        _record_corruption(journal, found, hosts)
        raise


def _set_up_torch(hosts: Sequence[str], deterministic: bool) -> None:
    """Set torch's number of threads, so that the ranks of a machine share its cores, and torch's determinism."""
    torch.set_num_threads(threads_per_rank(hosts.count(socket.gethostname())))
    set_determinism(deterministic)


def threads_per_rank(ranks: int) -> int:
    """Return the number of threads of each rank on a machine with `ranks` ranks."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _build_engine(
    run: Run, tokenizer: Tokenizer, peers: Peers, good: ResumePoint | None, pieces: Pieces | None
) -> tuple[ObjectiveModule, Engine, InitialWeights | None]:
    """Return the model, its engine, and the initial weights of a new run (None if they are drawn at random, or the run
    resumes). `pieces`: the compiled pieces with which layers compute; None if they are not compiled."""
    model = build_model(run.recipe, tokenizer)
    compile_layers(model, pieces)
    teachers = attach_teachers(model, run, tokenizer, peers)
    begin = None if good else initial_weights(run, tokenizer, model, peers, teachers)
    config = engine_config(run.recipe)
    measured = peers.all_gather(verified_rank_count(config))
    if not sums_are_verified([ranks for ranks in measured if isinstance(ranks, int)]):
        verify_gradient_sums(config)
    average = run.recipe.average
    engine = Engine(model, build_optimizer(run.recipe, model), config, average.ema if average else None)
    return model, engine, begin


def _load_state(
    run: Run, engine: Engine, good: ResumePoint | None, begin: InitialWeights | None, link: SupervisorLink
) -> TrainState:
    """Load the checkpoint or the initial weights into `engine`, and return the trainer's state. Each range that is read
    counts as progress in the heartbeats. An average of the weights that is not stored begins as the weights."""
    if good is not None:
        ensure_same_optimizer(good.manifest, engine.own_kinds, run.uri)
        step, reads = good.manifest.step, count(1)
        with good.open() as reader:

            def read(name: str, kind: str, start: int, stop: int) -> Float32[Tensor, " length"]:
                link.beat(step, "loading", next(reads))
                return reader.read(name, kind, start, stop)

            engine.restore([kind for kind in ALL_KINDS if kind != AVERAGE or good.averaged], read)
        return TrainState.from_json(good.manifest.state)
    if begin is not None:
        with closing(begin):
            engine.restore((MASTER,), begin.read)
    return TrainState()


def _leave_out_removed(run: Run, attempt: Attempt, state: TrainState, peers: Peers, journal: RankJournal) -> Run:
    """Return `run` so that its data leave removed documents out, from step `state.step` on or from an earlier one."""
    settled, added = agree_on_removals(run, attempt, state.step, peers)
    if added is not None:
        journal.event("removals", step=added.step, states=added.states)
        journal.note(f"the run leaves removed documents out from step {added.step:,} on")
    return settled


def _open_data(
    run: Run,
    tokenizer: Tokenizer,
    open_stream: OpenStream,
    lost: SkippedData,
    model: ObjectiveModule,
    engine: Engine,
    control: RankGroup,
) -> tuple[RankData, StepSampleRanges, RankShard]:
    """Open the data, without removed documents and the ranges that rewinds skip. Return this rank's data, the positions
    of all steps, and the rank's share."""
    streams = [open_stream(stream_spec(run, tokenizer, n)) for n in range(len(run.recipe.phases))]
    positions = sample_positions(run, streams, lost.ranges)
    share = RankShard(control.rank, control.world, run.recipe.microbatch_rows_by_phase)
    heldout, refresh = _open_heldout_texts(run, tokenizer, open_stream), run.recipe.memory_refresh
    data = RankData(streams, positions, heldout, share, engine.device, model.target_counts, refresh)
    return data, positions, share


def _open_heldout_texts(run: Run, tokenizer: Tokenizer, open_stream: OpenStream) -> dict[str, HeldOutText]:
    texts = {"": heldout_specs(run, tokenizer), BEFORE_PREFIX: before_text_specs(run, tokenizer)}
    return {prefix: _open_heldout_text(run, specs, open_stream) for prefix, specs in texts.items() if specs}


def _open_heldout_text(run: Run, specs: Sequence[StreamSpec], open_stream: OpenStream) -> HeldOutText:
    """Return each phase's held-out stream, opening equal streams once, and how many of its rows are evaluated."""
    opened = {spec.fingerprint: open_stream(spec) for spec in {spec.fingerprint: spec for spec in specs}.values()}
    streams = [opened[spec.fingerprint] for spec in specs]
    return streams, min(run.recipe.evaluation.samples, streams[-1].samples_per_epoch)


def _make_checkpointer(
    run: Run,
    attempt: Attempt,
    peers: Peers,
    journal: RankJournal,
    guard: SpikeGuard,
    resumed: ResumePoint | None,
) -> RunCheckpointer:
    """Return the checkpointer. If the recipe recomputes the model's memory every few steps, checkpoints are taken at
    those steps, so that they need not hold the memory."""
    refresh = run.recipe.memory_refresh
    return RunCheckpointer(
        run.store,
        attempt,
        peers,
        settings=run.recipe.checkpoint,
        journal=journal,
        extra=guard,
        resumed=resumed,
        save_multiple=refresh.every if refresh else 1,
    )


def _restore_memories(run: Run, engine: Engine, good: ResumePoint | None, data: RankData, share: RankShard) -> Memories:
    """Return the memory of this rank's microbatches at the step from which the run resumes; empty if that step
    recomputes it.

    Raises RunError if the checkpoint does not hold the memory, because the recipe was changed.
    """
    if good is None:
        return {}
    with closing(good):  # nothing is read from this checkpoint after XLNet's memory
        return _read_memories(run, engine, good, data, share) if data.carries_memory(good.manifest.step) else {}


def _read_memories(run: Run, engine: Engine, good: ResumePoint, data: RankData, share: RankShard) -> Memories:
    memories: Memories = {}
    step, shapes = good.manifest.step, good.manifest.memory
    total, rows = data.microbatch_count(step), data.microbatch_rows(step)
    if {shape[0] for shape in shapes.values()} != {total * rows}:
        raise RunError(
            f"the checkpoint of step {step} does not hold XLNet's memory, which the next step needs",
            remedy="set model.memory_refresh, the phases and the batch back to their former values: memory is "
            "recomputed at multiples of memory_refresh and at the beginning of a phase, and carried over elsewhere",
        )
    with good.open() as reader:
        restore_memory(memories, shapes, reader.read, range(share.rank, total, share.world), rows, engine)
    return memories


def _open_journal(
    run: Run,
    attempt: Attempt,
    control: RankGroup,
    link: SupervisorLink,
    startup: StartupClock,
    hosts: list[str],
    tokenizer: Tokenizer,
    engine: Engine,
) -> RankJournal:
    if control.rank != 0:
        return RankJournal(link, startup, None)
    metrics = RunLog(run.store, attempt.number, run.recipe.logging.flush_seconds, link.note)
    stragglers = StragglerDetector(run.recipe.stragglers, forward=run.recipe.zero < 3)
    meter = run_utilisation(run.recipe, tokenizer.vocab_size, engine.device, control.world)
    return RankJournal(link, startup, metrics, stragglers, hosts, meter)


def _record_corruption(journal: RankJournal, found: CorruptReplica, hosts: Sequence[str]) -> None:
    """Record that weights differ. The event's `ranks` and `hosts` are empty if it is unknown which ranks are wrong."""
    where = [hosts[rank] for rank in found.ranks]
    journal.event("corruption", step=found.step, ranks=list(found.ranks), hosts=where, tensor=found.tensor)
    journal.note(f"{found}; back to the last checkpoint")


def _record_start(
    run: Run,
    journal: RankJournal,
    state: TrainState,
    good: ResumePoint | None,
    begin: InitialWeights | None,
    control: RankGroup,
    found: tuple[Sequence[NodeReport], Sequence[KernelVerdict], MicrobatchLimits | None, CompilationRecord | None],
) -> None:
    """Record how this start begins. `found`: preflight reports, verdicts on kernels, limits of microbatches, and the
    decision on compiled layers."""
    _record_start_or_resume(run, journal, state, good, begin, control)
    if untested := untested_torch_warning():
        journal.note(untested)
    reports, verdicts, limits, compilation = found
    for report in reports:
        journal.event("preflight", **report.event_fields())
    record_kernels(journal, verdicts)
    if limits is not None:
        record_microbatches(journal, limits, state.step, limits_origin_text(limits))
    record_compilation(journal, compilation)


def _record_start_or_resume(
    run: Run,
    journal: RankJournal,
    state: TrainState,
    good: ResumePoint | None,
    begin: InitialWeights | None,
    control: RankGroup,
) -> None:
    if good is None:
        journal.event("start", step=0, world=control.world, **(begin.record if begin else {}))
        if begin is not None:
            journal.note(begin.summary())
        return
    memory = {"memory": True} if good.memory is not None else {}
    journal.event("resume", step=state.step, attempt_of=good.manifest.attempt, world=control.world, **memory)
    if change := describe_torch_change(good.manifest.versions.get("torch", ""), version("torch")):
        journal.note(change)
    for damage in good.passed_over:
        journal.event("damaged_checkpoint", what=damage)
        journal.note(f"skipped a damaged checkpoint: {damage}")
    if run.recipe.average is not None and not good.averaged:
        journal.note(f"the average of the weights begins at step {state.step:,}: the checkpoint has no average")
    if good.memory is not None and control.rank == 0:
        journal.restore(missing_records(run, good.manifest.attempt, good.memory))
