"""The measures that `maskfleet diagnose` takes of one checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from data_service.store.open import open_store
from launcher.after.diagnose.isotropy import anisotropy, heldout_sentences
from launcher.after.diagnose.measures import held_out, linear_probe, similarity
from launcher.after.diagnose.own_data import probe_splits, similarity_pairs
from launcher.after.diagnose.states import Checkpoint, Frozen, open_checkpoint, open_frozen, rows_of_texts
from launcher.after.tasks.task import load_task
from launcher.errors import OptionError
from launcher.runtime.recipe.evaluation import HeldOutSettings, Pooling, ProbeSettings, SimilaritySettings
from launcher.runtime.run.evaluations import Figure
from launcher.runtime.run.record import RECORD, open_run


@dataclass(frozen=True)
class DiagnosticRequest:
    """A request for measurements.

    Attributes:
        text: file whose lines are the texts for anisotropy; None: a run's held-out text.
        tasks: names or YAML files of tasks.
        data: folder or s3:// URI with the files of the tasks.
        poolings: names of poolings; empty for cls and mean.
        limit: largest number of texts, and of examples of a split.
    """

    text: Path | None
    tasks: tuple[str, ...]
    data: str | None
    poolings: tuple[str, ...]
    limit: int


@dataclass(frozen=True)
class Diagnosis:
    """The figures of one measurement, with a title for the user."""

    title: str
    task: str
    figures: Sequence[Figure]

    def records(self) -> list[dict[str, object]]:
        """Return the figures as plain data, for programs."""
        return [{"task": self.task} | figure.model_dump() for figure in self.figures]


def measured(source: str, step: int | None, wanted: DiagnosticRequest) -> Iterator[Diagnosis]:
    """Yield the measurements one after another.

    Raises OptionError if there is nothing to measure or no such pooling; also the errors of `open_frozen`, `load_task`
    and the measures.
    """
    poolings = _poolings(wanted.poolings)
    is_run = open_store(source).size(RECORD) is not None
    if not is_run and wanted.text is None and not wanted.tasks:
        raise OptionError(
            f"{source} is a model without text of its own", remedy="give --text FILE or --task NAME"
        )
    checkpoint = open_checkpoint(open_run(source), step) if is_run else None
    frozen = checkpoint.frozen if checkpoint else open_frozen(source, step)
    if wanted.text is not None:
        rows = rows_of_texts(frozen, _lines(wanted.text, wanted.limit))
        figures = anisotropy(frozen, rows, poolings)
        yield Diagnosis(f"Anisotropy of {frozen.name} on {len(rows):,} texts", "anisotropy", figures)
    if checkpoint is not None:
        yield from _of_run(checkpoint, wanted, poolings)
    for name in wanted.tasks:
        yield _of_task(frozen, name, wanted, poolings)


def _of_run(
    checkpoint: Checkpoint, wanted: DiagnosticRequest, poolings: Sequence[Pooling]
) -> Iterator[Diagnosis]:
    frozen = checkpoint.frozen
    if wanted.text is None:
        rows = heldout_sentences(checkpoint.run, frozen, wanted.limit)
        figures = anisotropy(frozen, rows, poolings)
        title = f"Anisotropy of {frozen.name} on {len(rows):,} held-out sentences"
        yield Diagnosis(title, "anisotropy", figures)
    yield Diagnosis(
        f"Held-out loss of {frozen.name}", "heldout", held_out(checkpoint, HeldOutSettings().rows)
    )


def _of_task(frozen: Frozen, name: str, wanted: DiagnosticRequest, poolings: Sequence[Pooling]) -> Diagnosis:
    task = load_task(name, wanted.data)
    if task.kind in ("similarity", "regression"):
        pairs = similarity_pairs(SimilaritySettings(task=name, data=wanted.data))
        return Diagnosis(f"{task.name}: {len(pairs):,} pairs", task.name, similarity(frozen, pairs, poolings))
    splits = probe_splits(ProbeSettings(task=name, data=wanted.data, examples=wanted.limit))
    figures = [figure for pooling in poolings for figure in linear_probe(frozen, splits, pooling)]
    title = f"{task.name}: linear probe fitted on {len(splits.train):,} examples, measured on {len(splits.test):,}"
    return Diagnosis(title, task.name, figures)


def _poolings(names: Sequence[str]) -> list[Pooling]:
    known: dict[str, Pooling] = {pooling: pooling for pooling in get_args(Pooling)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(
            f"--pooling {unknown[0]}: no such pooling", remedy=f"give one of {', '.join(known)}"
        )
    return [known[name] for name in names] or ["cls", "mean"]


def _lines(path: Path, most: int) -> list[str]:
    """Return the first texts of a file that are not empty. Raises OptionError if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            texts = (line.strip() for line in lines)
            return [text for _, text in zip(range(most), filter(None, texts), strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--text {path} cannot be read: {error}", remedy="give a UTF-8 text file"
        ) from error
