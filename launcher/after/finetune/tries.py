"""Fine-tunes with each of several settings and keeps the model that is best on dev."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoints.hf.folder import RECORD, publish, removable
from data_service.processes import temporary_folder
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from launcher.after.finetune.export import RESULTS
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.resume import TRAINING, Scratch
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import Diverged, FinetuneOutcome, FinetuneSettings
from launcher.after.tasks.task import Task
from launcher.runtime.run.log import encode


@dataclass(frozen=True)
class Tried:
    """The result of one choice of settings.

    Attributes:
        settings: the settings.
        outcome: result of the fine-tuning; None if it failed.
        problem: why it failed; None if it did not.
        best: whether the result on dev is better than those of all earlier settings.
    """

    settings: FinetuneSettings
    outcome: FinetuneOutcome | None
    problem: str | None
    best: bool

    def record(self) -> dict[str, object]:
        metrics = None if self.outcome is None else dict(self.outcome.metrics)
        return {
            "settings": self.settings.model_dump(mode="json"),
            "metrics": metrics,
            "problem": self.problem,
        }


def try_each(
    pretrained: LocalModel,
    task: Task,
    choices: Sequence[FinetuneSettings],
    seed: int,
    out: str | None,
    scratch: Path | None = None,
) -> Iterator[Tried]:
    """Fine-tune with each of `choices`, one after another, and yield each result. After the last one, write the best
    model to `out`, with the results of all settings.

    With a `scratch` folder, an interrupted fine-tuning resumes; the folder is removed at the end, unless other files
    are in it. Settings with which the loss diverges are passed over.

    Raises Diverged if the loss diverges with all settings; other errors as `finetune`.
    """
    former = None if out is None else removable(open_store(out))
    tried: list[Tried] = []
    with temporary_folder("tries") as name:
        best: tuple[float, Path] | None = None
        for index, settings in enumerate(choices):
            folder = Path(name, str(index))
            try:
                kept = None if out is None else str(folder)
                place = None if scratch is None else scratch / str(index)
                outcome = finetune(pretrained, task, settings, seed, kept, scratch=place)
            except Diverged as error:
                if best is None and index == len(choices) - 1:
                    raise
                tried.append(Tried(settings, None, error.problem, best=False))
            else:
                value = next(iter(outcome.metrics.values()))
                better = best is None or value > best[0]
                best = (value, folder) if better or best is None else best
                tried.append(Tried(settings, outcome, None, better))
            yield tried[-1]
        if out is not None and former is not None and best is not None:
            _publish(best[1], out, former, tried)
    if scratch is not None:
        _remove(scratch)


def _remove(scratch: Path) -> None:
    for record in list(scratch.rglob(TRAINING)):
        Scratch(record.parent, kept=True).remove()
    for folder in (*sorted(scratch.rglob("*/"), reverse=True), scratch):
        with suppress(OSError):
            folder.rmdir()


def _publish(folder: Path, out: str, former: list[str], tried: Sequence[Tried]) -> None:
    (folder / RECORD).unlink()
    results = json.loads((folder / RESULTS).read_bytes())
    results["tried"] = json.loads(encode({"tried": [one.record() for one in tried]}))["tried"]
    (folder / RESULTS).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", "utf-8")
    try:
        publish(folder, open_store(out), former)
    except StoreError as error:  # keep a model that took hours to train
        kept = tempfile.mkdtemp(prefix="maskfleet-finetuned-")
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        raise type(error)(
            f"{error.problem}; the model is kept in {kept}",
            remedy=f"{error.remedy}; or copy {kept} to {out} yourself",
        ) from error
