"""Writes a fine-tuned model as a folder: what `AutoModelFor...` loads, the tokenizer, and where it comes from."""

import json
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from data_service.printable import one_line
from data_service.tokenizers.files import TOKENIZER_FILES
from launcher.after.finetune.encode import head_of
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.settings import FinetuneOutcome, FinetuneSettings
from launcher.after.tasks.task import Task
from launcher.runtime.run.log import encode

RESULTS = "results.json"
_PIPELINES = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}


@dataclass(frozen=True)
class Provenance:
    """A result with everything that it depends on.

    Attributes:
        pretrained: the checkpoint that the user gave.
        start: the model that was fine-tuned; it differs from `pretrained` if the task starts after another task.
        task_digest: digest of the task's settings and of the examples that were read.
    """

    pretrained: LocalModel
    start: LocalModel
    task: Task
    task_digest: str
    settings: FinetuneSettings
    seed: int
    outcome: FinetuneOutcome


def write_folder(model: Any, folder: Path, of: Provenance) -> None:
    """Write the model, its tokenizer's files, `results.json` and a card into `folder`."""
    model.save_pretrained(str(folder))
    for name in TOKENIZER_FILES:
        if (of.start.folder / name).is_file():
            shutil.copyfile(of.start.folder / name, folder / name)
    # `encode` writes null for numbers that are not finite.
    record = json.dumps(json.loads(encode(_results(of))), indent=2, ensure_ascii=False)
    (folder / RESULTS).write_text(record + "\n", "utf-8")
    (folder / "README.md").write_text(_model_card(model, of), "utf-8")


def _results(of: Provenance) -> dict[str, object]:
    checkpoint = {name: getattr(of.pretrained, name) for name in ("source", "step", "digest")}
    return {
        "task": of.task.name,
        "kind": of.task.kind,
        "task_digest": of.task_digest,
        "checkpoint": checkpoint,
        "started_from": {"name": of.start.name, "digest": of.start.digest},
        "settings": of.settings.model_dump(mode="json"),
        "seed": of.seed,
        **of.outcome.record(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }


def _model_card(model: Any, of: Provenance) -> str:
    fields = {
        "library_name": "transformers",
        "pipeline_tag": _PIPELINES[head_of(of.task)],
        "tags": ["maskfleet", model.config.model_type],
    }
    figures = ", ".join(f"{metric} {value:.4f}" for metric, value in of.outcome.metrics.items())
    start, name = one_line(of.start.name), type(model).__name__
    return (
        f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n\n# {of.task.name}\n\n"
        f"{start}, fine-tuned on {of.task.name} with Maskfleet (seed {of.seed}). transformers loads it as `{name}`.\n\n"
        f"On its dev split after epoch {of.outcome.best_epoch}, which was chosen by it: {figures}.\n\n"
        f"Settings and curves are in `{RESULTS}`.\n"
    )
