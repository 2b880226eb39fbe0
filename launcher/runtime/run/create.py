"""Creates a run (`create_run`, for `init`), checks before a start whether its recipe or inputs have changed
(`reconcile`), and writes allowed changes once the start has claimed the run (`store_changes`)."""

from collections.abc import Container, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from platform import python_version

from checkpoints.listing import list_committed
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.removals import load_removals, load_removals_up_to
from data_service.printable import shell_word
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RunChanged, RunError, TransientRunError
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_key, corpus_phase
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.inputs import Inputs, read_inputs, refuse_placeholders
from launcher.runtime.run.kept_tokenizer import keep_tokenizer
from launcher.runtime.run.log import record_operator_event
from launcher.runtime.run.outline import RUN_FORMAT, ForkOrigin, open_unused_store
from launcher.runtime.run.readiness import (
    ReportBlocks,
    check_mixture,
    check_rows,
    check_token_variety,
    record_compared_sources,
    refuse_heldout_leaks,
)
from launcher.runtime.run.record import RECIPE_FILE, RECORD_FILE, Run, RunRecord, dump_record, open_run
from launcher.runtime.run.removals import CorpusStates
from launcher.runtime.run.text_vectors import keep_modules

_RECORDED_LIBRARIES = ("maskfleet", "torch", "deepspeed", "ray", "numpy", "tokenizers")  # run.json has their versions


def read_all_inputs(recipe: Recipe, tokenizer: Tokenizer, past: Run | None = None) -> Inputs:
    """Return `read_inputs` with the identities of the teachers added. Raises as `read_inputs` and `read_teacher`.

    Args:
        past: the existing run; None for a new one. If `recipe` names the same teachers as `past`, their identities are
            taken from its record, and ranks verify them when they read the teachers (`read_teachers`).
    """
    inputs = read_inputs(recipe, tokenizer)
    wanted = recipe.objective.teachers
    if not wanted:
        return inputs
    if past is not None and past.recipe.objective.teachers == wanted:
        return inputs.model_copy(update={"teachers": past.record.inputs.teachers})
    from launcher.runtime.run.teachers import read_teacher  # imports torch

    found = tuple(read_teacher(recipe, number, tokenizer).identity() for number in range(len(wanted)))
    return inputs.model_copy(update={"teachers": found})


def create_run(
    recipe: Recipe,
    uri: str,
    now: datetime,
    report: ReportBlocks = lambda more, total: None,
) -> Run:
    """Create the run at `uri`.

    The caller must check that the tasks of `evaluation` can be measured (`launcher.after.tasks.measurable`).

    Args:
        report: progress callback of `refuse_heldout_leaks`.

    Raises:
        RunError: a run exists at `uri`, or another command is creating one there.
        CorpusError, TokenizerError, RecipeError: the inputs are absent, do not fit each other, or are too small; or a
            source's training text contains held-out text of another source.
        StoreError: the store cannot be written: no permission, no space, no such bucket.
    """
    store = open_unused_store(uri)
    resolved = absolute_uris(recipe)
    refuse_placeholders(resolved)
    tokenizer = load_tokenizer(resolved.tokenizer.uri)
    run = Run(uri, store, resolved, build_run_record(resolved, read_all_inputs(resolved, tokenizer), now))
    check_token_variety(run, tokenizer)
    check_rows(run, tokenizer)
    check_mixture(run, tokenizer)
    compared = refuse_heldout_leaks(resolved, report)
    reserve_run(store, resolved)
    keep_tokenizer(store, tokenizer)
    keep_modules(resolved, store)
    record_compared_sources(store, compared, now)
    write_run_record(store, run.record)
    return run


def reserve_run(store: Store, recipe: Recipe) -> None:
    """Write the resolved `recipe`, the first object of a new run. Raises RunError if another recipe is there."""
    text = recipe.to_yaml().encode()
    if not store.put_if_absent(RECIPE_FILE, text) and store.get(RECIPE_FILE) != text:
        raise RunError(
            f"{store.uri} has another recipe.yaml but no {RECORD_FILE}: an init was interrupted there, or is running",
            remedy=f"choose another URI, or delete {store.uri.rstrip('/')}/{RECIPE_FILE}",
        )


def write_run_record(store: Store, record: RunRecord) -> None:
    """Write run.json, the last object of a new run: with it, the run exists. Raises RunError if another command has
    created the run first."""
    if not store.put_if_absent(RECORD_FILE, dump_record(record)):
        raise RunError(
            f"another init has just created the run at {store.uri}",
            remedy=f"to train that run: maskfleet train {shell_word(store.uri)}",
        )


def reconcile(
    run: Run,
    *,
    recipe: Recipe | None,
    accept_changes: bool,
    now: datetime,
    without_removed: bool = False,
) -> Run:
    """Return `run` with `recipe` (None: its own), after checking that its inputs match its record.

    Operational fields of the recipe may change freely (`launcher.runtime.recipe.identity`). A change of an identity
    field, of a corpus or of the tokenizer is refused, unless `accept_changes`: then the returned run has a new record.
    This writes only a missing copy of the tokenizer, because a start that is refused later must change nothing.

    Documents that were removed from a corpus since the run was created are refused, unless `without_removed`: then the
    returned run skips them from the step at which it resumes (`launcher.runtime.run.removals`).

    Raises:
        RunChanged: identity or inputs have changed without `accept_changes` (the message has the diff), or documents
            were removed without `without_removed`.
        CorpusError, TokenizerError, RecipeError, StoreError: as in `create_run`.
    """
    wanted = run.recipe if recipe is None else absolute_uris(recipe)
    tokenizer = run.tokenizer_for(wanted)
    inputs = read_all_inputs(wanted, tokenizer, run)
    heads, inputs = inputs.removals, with_removals_at_creation(inputs, run.record.inputs)
    record = build_run_record(wanted, inputs, now, run.record.origins, run.record.data_begins)
    changes = identity_change_lines(run.record, record)
    if changes and not accept_changes:
        raise RunChanged(
            f"{run.uri} was started with other settings:\n" + "\n".join(f"  {line}" for line in changes),
            remedy=f"restore the old settings (or Maskfleet), or fork the run with the new ones: maskfleet runs fork "
            f"{shell_word(run.uri)} NEW --set KEY=VALUE; --accept-changes continues anyway and records the changes",
        )
    _refuse_corpus_changes(run, wanted, inputs)
    _refuse_removed_documents(replace(run, recipe=wanted), inputs, heads, without_removed)
    keep_tokenizer(run.store, tokenizer)
    record = record.model_copy(update={"created": run.record.created}) if changes else run.record
    return replace(run, recipe=wanted, record=record, wanted=heads, stored=run)


def store_changes(run: Run, now: datetime) -> None:
    """Write the recipe and record that `reconcile` has changed, and an event for each change. Call this after the start
    has claimed the run.

    Raises TransientRunError if another start has changed recipe or record since `reconcile`; StoreError.
    """
    before, stored = run.stored or run, open_run(run.uri)
    if (stored.recipe, stored.record) != (before.recipe, before.record):
        raise TransientRunError(
            f"the recipe or the record of {run.uri} was changed while this start waited for the run",
            remedy="run the same command again",
        )
    if dump_record(run.record) != dump_record(stored.record):  # equal dicts may differ in order
        changes = identity_change_lines(stored.record, run.record)
        record_operator_event(run.store, "identity_changed", now.timestamp(), changes=changes)
        run.store.put(RECORD_FILE, dump_record(run.record))
    if run.recipe.to_yaml() != stored.recipe.to_yaml():
        lines = identity.diff_lines(identity.flatten(stored.recipe.to_data()), identity.flatten(run.recipe.to_data()))
        record_operator_event(run.store, "recipe_changed", now.timestamp(), changes=lines)
        run.store.put(RECIPE_FILE, run.recipe.to_yaml().encode())


def with_removals_at_creation(inputs: Inputs, inputs_at_creation: Inputs) -> Inputs:
    """Return `inputs`, with the removals of `inputs_at_creation` for each corpus that has not changed since then."""
    same = [name for name, content in inputs.corpora.items() if inputs_at_creation.corpora.get(name) == content]
    kept = {name: digest for name, digest in inputs.removals.items() if name not in same}
    kept |= {name: inputs_at_creation.removals[name] for name in same if name in inputs_at_creation.removals}
    return inputs.model_copy(update={"removals": kept})


def _refuse_corpus_changes(run: Run, wanted: Recipe, inputs: Inputs) -> None:
    """Raise RunChanged if a phase that has begun would read another corpus than before in place of a source
    (`phases.N.corpora`)."""
    old, new = run.record.inputs.corpora, inputs.corpora
    changed = {name: corpus_phase(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    phases = sorted({number for number in changed.values() if number is not None})
    commits = list_committed(run.store) if phases else ()
    for number in phases:
        begins = sum(phase.steps for phase in wanted.phases[:number])
        if commits and commits[0].step > begins:
            raise RunChanged(
                f"{run.uri} has done {commits[0].step:,} steps, so the corpus of phase {number}, which begins at step "
                f"{begins:,}, can no longer change",
                remedy=f"name the corpus in a later phase, or fork the run with it: maskfleet runs fork "
                f"{shell_word(run.uri)} NEW --set KEY=VALUE",
            )


def _refuse_removed_documents(run: Run, inputs: Inputs, heads: CorpusStates, without_removed: bool) -> None:
    """Raise RunChanged if documents that the run reads were removed from their corpus, unless `without_removed`."""
    same = {name for name, content in inputs.corpora.items() if run.record.inputs.corpora.get(name) == content}
    lines = _new_removal_lines(run, heads, same)
    if lines and not without_removed:
        raise RunChanged(
            f"{run.uri} reads documents that were removed:\n" + "\n".join(f"  {line}" for line in lines),
            remedy=f"to skip them from the step at which training resumes: maskfleet train {shell_word(run.uri)} "
            "--without-removed",
        )


def _new_removal_lines(run: Run, heads: CorpusStates, sources: Container[str]) -> list[str]:
    """Return a line for each corpus of `sources` from which documents were removed that the run still reads.

    `heads`: present state of each corpus (`CorpusStates`).

    Raises:
        CorpusError: a corpus lacks removals that the run already skips, or its list of removals is damaged.
        StoreError: a store cannot be read.
    """
    lines = []
    for name, source in corpora_by_name(run.recipe).items():
        known = run.removals.get(name, "")
        if name not in sources or known == heads.get(name, ""):
            continue
        store = open_store(source.uri)
        manifest = load_manifest(store)
        before = load_removals_up_to(store, manifest, known)
        later = load_removals(store, manifest).removals[len(before.removals) :]
        documents = sum(len(one.train) + len(one.heldout) for one in later)
        lines.append(f"{corpus_key(name)}: {documents:,} documents were removed from {source.uri}")
    return lines


def identity_change_lines(old: RunRecord, new: RunRecord) -> list[str]:
    """Return a readable diff of two records: a line for every identity field or input that differs."""
    lines = identity.diff_lines(old.identity, new.identity)
    orders = [_source_order(record.identity) for record in (old, new)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        lines.append(f"- order of corpus.sources: {' -> '.join(map(', '.join, orders))}")
    lines += identity.diff_lines(old.inputs.named_fingerprints(), new.inputs.named_fingerprints())
    before, after = (
        old.inputs.named_manifest_digests(new.inputs),
        new.inputs.named_manifest_digests(old.inputs),
    )
    return [*lines, *identity.diff_lines(before, after)]


def _source_order(identity_fields: Mapping[str, object]) -> list[str]:
    """Return the names of the sources in recorded order. The order matters: blocks and shuffles are numbered by it."""
    paths = [path.split(".") for path in identity_fields]
    return list(dict.fromkeys(path[2] for path in paths if path[:2] == ["corpus", "sources"] and len(path) > 3))


def changed_fields(old: RunRecord, new: RunRecord) -> list[str]:
    """Return the identity fields and inputs that differ, by dotted path."""
    before, after = (record.identity | record.inputs.named_fingerprints() for record in (old, new))
    return identity.changed_paths(before, after)


def build_run_record(
    recipe: Recipe, inputs: Inputs, now: datetime, origins: tuple[ForkOrigin, ...] = (), data_begins: int = 0
) -> RunRecord:
    """Return the content of run.json for a run with this resolved recipe and these inputs."""
    fields = identity.identity_fields(recipe)
    further: dict[str, object] = {"data_begins": data_begins} if data_begins else {}
    return RunRecord(
        format=RUN_FORMAT,
        name=recipe.name,
        created=now.astimezone(UTC).isoformat(timespec="seconds"),
        identity=fields,
        fingerprint=identity.fingerprint({**fields, **inputs.named_fingerprints(), **further}),
        inputs=inputs,
        versions={"python": python_version()} | {name: metadata.version(name) for name in _RECORDED_LIBRARIES},
        origins=origins,
        data_begins=data_begins,
    )


_URI_PATHS = (
    "start",
    "corpus.sources.*.uri",
    "tokenizer.uri",
    "similar_words.uri",
    "objective.distil.teachers.*.uri",
    "phases.*.corpora.*",
    "evaluation.before.uri",
    "evaluation.tasks.*.data",
    "evaluation.tasks.*.task",
)
"""The recipe fields that may hold a local path or URI, by dotted path."""


def absolute_uris(recipe: Recipe) -> Recipe:
    """Return `recipe` with local paths made absolute: the run must find its inputs from any working directory."""
    return Recipe.model_validate(_with_absolute_uris(recipe.to_data(), ""))


def _with_absolute_uris(value: object, path: str) -> object:
    if isinstance(value, dict):
        return {key: _with_absolute_uris(each, f"{path}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_absolute_uris(each, f"{path}.{index}") for index, each in enumerate(value)]
    if not isinstance(value, str) or not any(fnmatchcase(path, pattern) for pattern in _URI_PATHS):
        return value
    bundled_task = path.endswith(".task") and Path(value).suffix not in (".yaml", ".yml")
    return value if value in (SCRATCH, TEACHER) or bundled_task else _absolute_uri(value)


def _absolute_uri(uri: str) -> str:
    return uri if "://" in uri else str(Path(uri).absolute())
