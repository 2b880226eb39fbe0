"""Checks a run: its log, its commits, its inputs, and, if it has a certificate, every byte against that.

Nothing stops at the first damage: each problem is named by the place where it lies, and the rest is read.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from checkpoints.errors import CheckpointError
from checkpoints.layout import CheckpointName
from checkpoints.verify import verify as verify_checkpoint
from data_service.corpus.corpus import open_corpus, verify_files
from data_service.corpus.manifest import MANIFEST
from data_service.errors import UserError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from launcher.after.certificate.facts import (
    commits,
    events,
    facts_of_commit,
    facts_of_inputs,
    facts_of_log,
    hash_files,
    hash_segments,
    identity_changed,
    other_files,
    read_commit,
)
from launcher.after.certificate.statement import (
    CHUNK,
    COMMIT,
    CertifiedFile,
    Facts,
    Statement,
    name_of_commit,
)
from launcher.runtime.recipe.corpora import corpora_of
from launcher.runtime.run.create import record_of
from launcher.runtime.run.outline import RECIPE, RECORD, read_files
from launcher.runtime.run.record import Run, open_run

_NEVER_CHANGED = ("attempts/", "checkpoints/", "metrics/", "events/", "removals/", "tokenizers/")

Begin = Callable[[str, int], Callable[[int], None]]
"""A function that is called when a part begins, with its name and its size in bytes, and returns the function to report
read bytes to, which is called from several threads."""


def silent(name: str, size: int) -> Callable[[int], None]:
    """Report nothing."""
    return lambda read: None


@dataclass(frozen=True)
class Problem:
    """A part of a run or corpus that is not what it should be. `place`: URI, with the byte range if one is known."""

    place: str
    what: str


@dataclass
class Examination:
    """The result of examining a run.

    Attributes:
        problems: everything that is wrong.
        notes: what differs from the certificate and may: new records, commits that are no longer kept.
        entries, files, segments: what a new certificate states (`statement.certified`).
        commits, corpora: names of what was checked.
        bytes: number of bytes that were read and compared.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: list[tuple[str, Facts]] = field(default_factory=list)
    files: dict[str, CertifiedFile] = field(default_factory=dict)
    segments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    corpora: list[str] = field(default_factory=list)
    bytes: int = 0


def examine(
    uri: str,
    former: Statement | None,
    *,
    renewing: bool = False,
    corpora: Mapping[str, str] | None = None,
    quick: bool = False,
    begin: Begin = silent,
) -> Examination:
    """Examine the run at `uri`.

    Args:
        former: its certificate. None: only what the run and its corpora say about themselves is checked.
        renewing: whether a new certificate is to be written. Settings and derived files may differ then: such changes
            are notes.
        corpora: URIs of corpora by source, in place of those in the recipe.
        quick: whether to compare only the sizes of checkpoints' and corpora's files.
        begin: see `Begin`.

    Raises:
        RunError: there is no run.
        StoreError: the run's store cannot be read.
    """
    examiner = _Examiner(open_store(uri), uri, former, renewing=renewing, quick=quick, begin=begin)
    return examiner.all(corpora or {})


class _Examiner:
    def __init__(
        self, store: Store, uri: str, former: Statement | None, *, renewing: bool, quick: bool, begin: Begin
    ) -> None:
        self._store, self._uri, self._former = store, uri, former
        self._renewing, self._quick, self._begin = renewing, quick, begin
        self._found, self._counted = Examination(), threading.Lock()

    def all(self, corpora: Mapping[str, str]) -> Examination:
        record, recipe = read_files(self._uri, self._store)
        self._log_and_files()
        try:
            run = open_run(self._uri)
        except UserError as error:
            self._problem(self._uri, error.problem)
            return self._found
        self._found.entries += facts_of_inputs(run, record, recipe)
        self._identity(run)
        self._tokenizer(run)
        for name, source in corpora_of(run.recipe).items():
            self._corpus(run, name, corpora.get(name, source.uri))
        self._commits(run)
        self._compare_entries()
        return self._found

    def _log_and_files(self) -> None:
        try:
            self._found.segments = hash_segments(self._store)
        except UserError as error:
            self._problem(self._uri, error.problem)
        listed = other_files(self._store, self._former.predicate.files if self._former else ())
        report = self._begin("reading the run's files", sum(listed.values()))
        self._found.files = hash_files(self._store, listed, self._counting(report))
        if self._former is not None:
            self._compare_files(self._former.predicate.files)
            self._compare_segments(self._former.predicate.segments)

    def _compare_files(self, certified: Mapping[str, CertifiedFile]) -> None:
        for key, file in certified.items():
            found = self._found.files.get(key)
            mark = CheckpointName.of(key)
            if found is None and mark is not None:
                continue  # the comparison of commits says so
            if found is None:
                self._differs(key, "is missing")
            elif found.size != file.size:
                self._differs(key, f"has {found.size} bytes instead of {file.size}")
            for number, (now, then) in enumerate(
                zip(found.sha256, file.sha256, strict=False) if found else ()
            ):
                if now != then:
                    stop = min((number + 1) * CHUNK, file.size)
                    self._differs(key, f"bytes {number * CHUNK} to {stop} were changed")
        if new := len(self._found.files.keys() - certified.keys()):
            self._found.notes.append(f"{new} files are newer than the certificate")

    def _compare_segments(self, certified: Mapping[str, tuple[str, ...]]) -> None:
        new = 0
        for prefix, digests in certified.items():
            found = self._found.segments.get(prefix, ())
            new += max(0, len(found) - len(digests))
            for number, digest in enumerate(digests):
                if number >= len(found):
                    self._problem(self._place(prefix), f"segments from {number} on are missing")
                    break
                if found[number] != digest:
                    self._problem(self._place(f"{prefix}{number:08d}.jsonl"), "was changed")
        new += sum(
            len(self._found.segments[prefix]) for prefix in self._found.segments.keys() - certified.keys()
        )
        if new:
            self._found.notes.append(f"{new} segments of the log are newer than the certificate")

    def _identity(self, run: Run) -> None:
        """Check that run.json is the record of the recipe."""
        made = record_of(
            run.recipe, run.record.inputs, datetime.now(UTC), run.record.origins, run.record.data_begins
        )
        if made.fingerprint != run.record.fingerprint and made.identity == run.record.identity:
            self._problem(self._place(RECORD), "its fingerprint is not that of its fields")
        if made.identity != run.record.identity:
            # Fields that a later version added, or made operational, differ without a mistake.
            differing = sorted(
                name
                for name in made.identity.keys() & run.record.identity.keys()
                if made.identity[name] != run.record.identity[name]
            )
            if differing:
                what = f"differs from {RECORD} in {', '.join(differing)}"
                self._problem(self._place(RECIPE), what)

    def _tokenizer(self, run: Run) -> None:
        try:
            run.tokenizer()
        except UserError as error:
            self._problem(self._place("tokenizers"), error.problem)

    def _corpus(self, run: Run, name: str, uri: str) -> None:
        recorded = run.record.inputs
        try:
            corpus = open_corpus(uri)
            manifest = corpus.manifest
            if manifest.fingerprint != recorded.corpora[name]:
                self._problem(f"{uri}/{MANIFEST}", "is the manifest of another corpus than the run's")
            elif manifest.digest != recorded.manifests.get(name, manifest.digest):
                self._problem(f"{uri}/{MANIFEST}", "was changed since the run began")
            if not self._quick:
                total = sum(manifest.shard_sizes.values())
                report = self._counting(self._begin(f"verifying corpus {name}", total))
                damage = verify_files(corpus.store, manifest, lambda read, _: report(read)).damage
                for one in damage:
                    self._problem(f"{uri}/{one.key}", one.problem)
        except UserError as error:
            self._problem(uri, error.problem)
        self._found.corpora.append(name)

    def _commits(self, run: Run) -> None:
        try:
            lines = events(self._store)
        except UserError:  # `hash_segments` has named it
            lines = []
        self._found.entries += facts_of_log(lines)
        changed = identity_changed(lines)
        for mark in commits(self._store):
            try:
                self._commit(run, mark, changed)
            except (CheckpointError, KeyMissing) as error:
                if self._store.size(mark.manifest) is not None:  # it was not deleted meanwhile
                    self._problem(self._place(mark.folder), error.problem)

    def _commit(self, run: Run, mark: CheckpointName, changed: float) -> None:
        manifest, data = read_commit(self._store, mark)
        name = name_of_commit(mark)
        report = self._counting(self._begin(f"verifying {name}", manifest.bytes))
        wrong = verify_checkpoint(self._store, manifest, full=not self._quick, report=report)
        if wrong and self._store.size(mark.manifest) is None:
            return
        for problem in wrong:
            where, _, what = problem.partition(" ")
            self._problem(where, what)
        self._found.commits.append(name)
        if not (wrong or self._quick):
            self._found.entries.append(facts_of_commit(run, manifest, data, changed))

    def _compare_entries(self) -> None:
        """Compare the facts with those of the certificate, and say which commits are no longer kept."""
        if self._former is None:
            return
        known, found = self._former.newest, dict(self._found.entries)
        for what, facts in known.items():
            if what in found:
                for name in sorted(facts.keys() | found[what].keys()):
                    then, now = facts.get(name), found[what].get(name)
                    if (
                        then != now
                        and None not in (then, now)
                        and not (self._renewing and what in ("run", "recipe"))
                    ):
                        self._problem(self._uri, f"{what}: {name} is {now} instead of {then}")
            elif what.startswith(COMMIT) and what not in self._found.commits:
                self._found.notes.append(f"{what} is no longer kept")
        if new := [name for name in self._found.commits if name not in known]:
            self._found.notes.append(f"newer than the certificate: {', '.join(new)}")

    def _counting(self, report: Callable[[int], None]) -> Callable[[int], None]:
        def count(read: int) -> None:
            with self._counted:
                self._found.bytes += read
            report(read)

        return count

    def _differs(self, key: str, what: str) -> None:
        """Report that an object is not what it was when the certificate was written."""
        if self._renewing and not key.startswith(_NEVER_CHANGED):
            self._found.notes.append(f"{key} {what} since the former certificate")
        else:
            self._problem(self._place(key), what)

    def _problem(self, place: str, what: str) -> None:
        self._found.problems.append(Problem(place, what))

    def _place(self, key: str) -> str:
        return f"{self._uri.rstrip('/')}/{key}"
