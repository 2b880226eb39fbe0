"""Forks a run: creates a new run from another run's checkpoint (weights, moments, step, and position in the data).

Everything in the recipe may be changed, except the model. The step count and the learning-rate schedule continue. The
data continues at the same position if the new recipe would have read the same samples up to it; otherwise it starts
from the beginning. The checkpoint is copied, so the source run may be deleted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase

from pydantic import JsonValue

from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import SKIPS_KEY, list_committed, read_rewinds, skipped_ranges
from checkpoints.load import ensure_same_optimizer
from checkpoints.verify import COPIED_ATTEMPT, copy_checkpoint
from data_service.printable import shell_word
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.optim.schedules import ScheduleConfig
from encoder_core.train.zero_state import own_kinds
from launcher.errors import RunChanged, RunError
from launcher.runtime.recipe.corpora import corpus_phase
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.recipe.network import meta_module
from launcher.runtime.recipe.phase_parts import PhaseMixture
from launcher.runtime.recipe.phases import is_staged, planned_steps, source_shares, source_temperature
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import batch_schedule, curve_name_at, phase_at
from launcher.runtime.run.create import (
    absolute_uris,
    build_run_record,
    changed_fields,
    identity_change_lines,
    read_all_inputs,
    reserve_run,
    with_removals_at_creation,
    write_run_record,
)
from launcher.runtime.run.inputs import Inputs
from launcher.runtime.run.kept_tokenizer import keep_tokenizer
from launcher.runtime.run.log import record_operator_event
from launcher.runtime.run.outline import ForkOrigin, open_unused_store
from launcher.runtime.run.readiness import refuse_heldout_leaks
from launcher.runtime.run.record import COMMITTED_KEY, Run, RunRecord, select_checkpoint
from launcher.runtime.run.removals import CorpusStates, RemovalHistory, RemovalRecord, write_removals
from launcher.runtime.run.streams import SPIKES_KEY
from launcher.runtime.run.text_vectors import read_kept_modules, store_modules

_DATA_KEYS = (
    "seed",
    "corpus.*",
    "input.*",
    "shuffle",
    "mixing.*",
)  # recipe fields that decide which samples a step reads
_FIXED_PATHS = ("model.*", "tokenizer (content)", "start")  # what a fork must not change, except _FREE_PATHS
_FREE_PATHS = (
    "model.dropout",
    "model.attention_dropout",
)  # model fields that a fork may change: no shape of a weight depends on them


@dataclass(frozen=True)
class ForkResult:
    """The result of `fork`.

    Attributes:
        run: the new run.
        step: step of the copied checkpoint.
        changes: readable diff: a line for every identity field or input that differs from the source run.
        restarted: names of the changed settings that make the data start from the beginning; empty if it continues.
    """

    run: Run
    step: int
    changes: tuple[str, ...]
    restarted: tuple[str, ...]


def fork(
    source: Run,
    uri: str,
    step: int | None,
    assignments: Sequence[str],
    *,
    keep_position: bool,
    now: datetime,
    decay: int | None = None,
) -> ForkResult:
    """Create at `uri` a run that continues from the checkpoint of `source` at `step` (None: the newest good one).

    Args:
        assignments: changes of the recipe, in the syntax of `--set`.
        decay: number of further steps, in which the learning rate decays and after which the fork ends; None: as the
            recipe says.
        keep_position: whether the data position is kept even if the recipe changes which samples are read.

    Raises:
        RunError: a run exists at `uri`, there is no such checkpoint, no step is left to train, or with `decay` the
            learning rate is not constant at the checkpoint.
        RunChanged: the recipe changes the model.
        CheckpointError: the new recipe's optimizer has other moments; or the checkpoint is damaged.
        RecipeError, CorpusError, TokenizerError, StoreError: as for `create_run`.
    """
    store = open_unused_store(uri)
    manifest = select_checkpoint(source, step)
    base = source.recipe if decay is None else with_decay(source.recipe, manifest.step, decay)
    recipe = _with_planned_data(source.recipe, absolute_uris(with_assignments(base, tuple(assignments))), manifest.step)
    tokenizer = source.tokenizer_for(recipe)
    inputs, past = read_all_inputs(recipe, tokenizer, source), source.record
    if inputs.corpora != past.inputs.corpora:
        refuse_heldout_leaks(recipe)
    heads, inputs = inputs.removals, with_removals_at_creation(inputs, past.inputs)
    wanted = build_run_record(recipe, inputs, now, data_begins=past.data_begins)
    _check_model(source, recipe, wanted, manifest, tokenizer)
    _check_target(store.uri, list_committed(store), recipe, manifest.step)
    restarted = () if keep_position else tuple(_data_changes(source, recipe, wanted, manifest.step))
    origin = ForkOrigin(
        run=source.store.uri,
        fingerprint=past.fingerprint,
        step=manifest.step,
        attempt=manifest.attempt,
        changes=tuple(identity_change_lines(past, wanted)),
    )
    begins = manifest.step if restarted else past.data_begins
    record = build_run_record(recipe, inputs, now, (*past.origins, origin), begins)
    reserve_run(store, recipe)
    keep_tokenizer(store, tokenizer)
    store_modules(store, read_kept_modules(source.store))
    copy_checkpoint(source.store, _standalone_manifest(source, manifest, bool(restarted)), store, now.timestamp())
    left_out = _removal_records(source, manifest.step, heads, inputs)
    for number, known in enumerate(left_out, 1):
        write_removals(store, number, known)
    store.put_if_absent(COMMITTED_KEY, b"{}\n")  # a fork that loses its checkpoint must not start from scratch
    write_run_record(store, record)
    fields = origin.model_dump(exclude={"attempt"}) | {"attempt_of": origin.attempt, "data_begins": begins}
    record_operator_event(store, "fork", now.timestamp(), **fields)
    return ForkResult(Run(uri, store, recipe, record, left_out), manifest.step, origin.changes, restarted)


def _removal_records(source: Run, step: int, heads: CorpusStates, inputs: Inputs) -> tuple[RemovalRecord, ...]:
    """Return the removal records of a fork at `step`: those of `source` before `step`, and one with all removals until
    now. `heads`: present state of each corpus. `inputs`: inputs of the fork."""
    known = tuple(one.model_copy(update={"attempt": 0}) for one in source.left_out if one.step < step)
    if dict(RemovalHistory(inputs.removals, known).states_at(step)) == dict(heads):
        return known
    return (*known, RemovalRecord(step=step, attempt=0, states=dict(heads)))


def _standalone_manifest(source: Run, manifest: CheckpointManifest, restarted: bool) -> CheckpointManifest:
    """Return the manifest of the copied checkpoint. Its state contains the ranges of data that `source` skips.

    If the data starts from the beginning (`restarted`), it contains neither ranges nor losses for the spike policy.
    """
    if restarted:
        state = {name: value for name, value in manifest.state.items() if name not in (SKIPS_KEY, SPIKES_KEY)}
    else:
        left_out = skipped_ranges(manifest, read_rewinds(source.store))
        state = manifest.state | {SKIPS_KEY: [list[JsonValue](span) for span in left_out]}
    return manifest.model_copy(update={"state": state})


def _start_option(source: Run) -> str:
    return f"--set {shell_word(f'start={source.uri}')}"


def _check_model(
    source: Run, recipe: Recipe, wanted: RunRecord, manifest: CheckpointManifest, tokenizer: Tokenizer
) -> None:
    """Raise RunChanged if the fork would have another model than `source`, CheckpointError if other moments."""
    past = source.record
    fixed = [
        path
        for path in changed_fields(past, wanted)
        if _matches_any(path, _FIXED_PATHS) and not _matches_any(path, _FREE_PATHS)
    ]
    if fixed:
        lines = [line for line in identity_change_lines(past, wanted) if line[2:].startswith(tuple(fixed))]
        raise RunChanged(
            f"a fork of {source.uri} must keep its model:\n" + "\n".join(f"  {line}" for line in lines),
            remedy=f"to change the model, create a new run that starts from its weights: {_start_option(source)}",
        )
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    module = meta_module(config, recipe.objective)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    differing = sorted(dict(shapes.items() ^ manifest.shapes.items()))
    if differing:
        raise RunChanged(
            f"the recipe's objective has other parameters than {source.uri}: {', '.join(differing)}",
            remedy=f"to change them, create a new run that starts from its weights: {_start_option(source)}",
        )
    ensure_same_optimizer(manifest, own_kinds(module, muon=recipe.optimizer.muon is not None), source.uri)


def _check_target(uri: str, checkpoints: Sequence[CheckpointName], recipe: Recipe, step: int) -> None:
    """Raise RunError if the store at `uri` has another checkpoint, or if the fork has no step left to train."""
    if any(mark != CheckpointName(COPIED_ATTEMPT, step) for mark in checkpoints):
        raise RunError(
            f"{uri} has another checkpoint already: a fork was interrupted there, or is running",
            remedy="choose another URI, or delete that folder",
        )
    if step >= recipe.total_steps:
        raise RunError(
            f"the checkpoint is of step {step:,}, but the phases end at step {recipe.total_steps:,}",
            remedy="give the fork more steps (--set phases.0.steps=...), or take an earlier checkpoint (--step)",
        )


def _data_changes(source: Run, recipe: Recipe, wanted: RunRecord, step: int) -> Iterator[str]:
    """Yield the names of the changed settings because of which steps before `step` would have read other data."""
    changed = changed_fields(source.record, wanted)
    yield from (path for path in changed if _matches_any(path, _DATA_KEYS))
    for path in changed:
        phase = corpus_phase(path)
        if phase is not None and sum(each.steps for each in recipe.phases[:phase]) < step:
            yield path
    begin = source.record.data_begins
    if _data_of_steps(source.recipe, begin, step) != _data_of_steps(recipe, begin, step):
        yield "phases"


def _with_planned_data(past: Recipe, recipe: Recipe, step: int) -> Recipe:
    """Return `recipe` with `mixture.steps` set so that a longer or shorter phase at `step` still reads the data of
    `past`.

    This is needed only if phases continue reading each source where the phase before stopped (`is_staged`).
    """
    number, _ = phase_at(recipe, max(0, step - 1))
    if not is_staged(past) or number >= len(past.phases):
        return recipe
    was, phase = past.phases[number], recipe.phases[number]
    if was.steps == phase.steps and is_staged(recipe):
        return recipe
    mixture = phase.mixture or PhaseMixture()
    if mixture.steps is not None:
        return recipe
    kept = phase.model_copy(update={"mixture": mixture.model_copy(update={"steps": planned_steps(was)})})
    phases = (*recipe.phases[:number], kept, *recipe.phases[number + 1 :])
    return recipe.model_copy(update={"phases": phases})


def _data_of_steps(recipe: Recipe, begin: int, stop: int) -> list[tuple[object, ...]]:
    """Return the settings that determine the data of steps `begin` to `stop`, as a tuple for each phase: number of
    steps, row length, whether batches count tokens, batch schedule; for a staged recipe (`is_staged`) also the number
    of planned steps, the shares of the sources and their temperature."""
    taken, first = list[tuple[object, ...]](), 0
    for phase in recipe.phases:
        steps = min(first + phase.steps, stop) - max(first, begin)
        if steps > 0:
            in_tokens = phase.batch.tokens is not None
            rows = (steps, phase.length, in_tokens, batch_schedule(recipe, phase))
            shares = source_shares(recipe, phase), source_temperature(recipe, phase)
            sources = (planned_steps(phase), *shares) if is_staged(recipe) else ()
            taken.append((*rows, *sources))
        first += phase.steps
    return taken


def _matches_any(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def with_decay(recipe: Recipe, step: int, decay_steps: int) -> Recipe:
    """Return `recipe` cut after `step` plus `decay_steps` steps, in which the learning rate decays to the schedule's
    floor: with the schedule's decay curve, or with 1 - sqrt if it has none.

    Raises RunError if the learning rate is not constant just before `step`.
    """
    last = max(0, step - 1)  # the last trained step; 0 if none was trained
    number, start = phase_at(recipe, last)
    curve = curve_name_at(recipe, last)
    if curve != "stable":
        how = "is still rising" if curve == "warmup" else "is already decaying"
        raise RunError(
            f"the learning rate {how} at step {step:,}, but --decay must begin where it is constant",
            remedy="choose a checkpoint where the rate is stable (--step); `maskfleet recipe show RECIPE --timeline` "
            "shows such steps, and schedule.decay_steps in the recipe makes some",
        )
    phase = recipe.phases[number]
    changes: dict[str, object] = {"steps": step - start + decay_steps}
    if phase.schedule is not None:
        changes["schedule"] = _decay_schedule(phase.schedule, decay_steps)
    ended = recipe.model_copy(update={"phases": (*recipe.phases[:number], phase.model_copy(update=changes))})
    if phase.schedule is not None:
        return ended
    return ended.model_copy(update={"schedule": _decay_schedule(recipe.schedule, decay_steps)})


def _decay_schedule(schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
    decay = "one_minus_sqrt" if schedule.decay == "constant" else schedule.decay
    return schedule.model_copy(update={"decay": decay, "decay_steps": steps, "restarts": 0})
