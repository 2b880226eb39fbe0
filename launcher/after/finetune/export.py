"""Writes a fine-tuned model as a folder: what `AutoModelFor...` loads, the tokenizer, and where the model comes from.

No class of transformers can hold one of our own heads. A model with such a head is written as an encoder, which
`AutoModel` loads, with the head in two files beside it; `open_finetuned` joins them again.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints.errors import ExportError
from checkpoints.hf.folder import WEIGHTS
from data_service.formats import REMEDY, is_newer, newer
from data_service.printable import one_line
from data_service.tokenizers.files import TOKENIZER_FILES
from launcher.after.finetune.heads import HeadConfig, MixedHead
from launcher.after.finetune.network import TaskNetwork, quiet
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.settings import FinetuneOutcome, FinetuneSettings
from launcher.after.tasks.task import Task
from launcher.errors import EVALUATE, optional, reason
from launcher.runtime.run.log import encode

RESULTS = "results.json"
HEAD, HEAD_WEIGHTS = "head.json", "head.safetensors"
_USE = "fine-tuning"
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
        task: the task.
        task_digest: digest of the task's settings and of the examples that were read.
        settings: settings of the fine-tuning.
        seed: seed of the fine-tuning.
        outcome: the result.
    """

    pretrained: LocalModel
    start: LocalModel
    task: Task
    task_digest: str
    settings: FinetuneSettings
    seed: int
    outcome: FinetuneOutcome


def write_export(network: TaskNetwork, folder: Path, provenance: Provenance) -> None:
    """Write the model into the empty `folder`. Raises ExportError if it does not read back bit for bit."""
    network.config.architectures = [type(network.model).__name__]
    network.config.save_pretrained(str(folder))
    _save(network.model, folder / WEIGHTS)
    if network.head is not None:
        (folder / HEAD).write_text(network.head.config.model_dump_json(indent=2) + "\n")
        _save(network.head, folder / HEAD_WEIGHTS)
    for name in TOKENIZER_FILES:
        if (provenance.start.folder / name).is_file():
            shutil.copyfile(provenance.start.folder / name, folder / name)
    (folder / RESULTS).write_text(_indented(_results(provenance)), "utf-8")
    (folder / "README.md").write_text(_card(network, provenance), "utf-8")
    _check_read_back(network, folder)


def _save(module: nn.Module, path: Path) -> None:
    """Write the weights as `save_pretrained` does, which is not used because it loads DeepSpeed if that is
    installed."""
    weights = {name: tensor.contiguous().cpu() for name, tensor in module.state_dict().items()}
    save_file(weights, path, metadata={"format": "pt"})


def open_finetuned(folder: Path) -> TaskNetwork:
    """Return the model in a folder that `maskfleet finetune` wrote, on the CPU. Raises ExportError if it is another
    folder, or a newer version wrote it."""
    transformers = optional("transformers", _USE, EVALUATE)
    try:
        name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
        loader = getattr(transformers, name)
        with quiet(transformers):
            model: Any = loader.from_pretrained(
                str(folder), dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
        head = None
        if (folder / HEAD).is_file():
            head = MixedHead(read_head(folder / HEAD))
            head.load_state_dict(load_file(folder / HEAD_WEIGHTS))
            model.pooler = None
    except ExportError:
        raise
    except Exception as error:  # of any kind: see `reason`
        raise ExportError(
            f"{folder} is no model that maskfleet finetune wrote: {reason(error)}",
            remedy="give the folder of --out",
        ) from error
    return TaskNetwork(model, head, frozen=False).eval()


def read_head(path: Path) -> HeadConfig:
    """Return the configuration of a head. Raises ExportError if a newer version wrote it, ValidationError if the file
    is no such configuration."""
    data = path.read_bytes()
    try:
        return HeadConfig.model_validate_json(data)
    except ValidationError as error:
        if is_newer(data, known=1, error=error):
            raise ExportError(newer(str(path)), remedy=REMEDY) from error
        raise


def _check_read_back(network: TaskNetwork, folder: Path) -> None:
    again = open_finetuned(folder).state_dict()
    written = network.state_dict()
    if again.keys() != written.keys() or not all(
        torch.equal(again[name], tensor.cpu()) for name, tensor in written.items()
    ):
        raise ExportError(
            f"the written {type(network.model).__name__} does not read back bit for bit",
            remedy="report this with the versions of transformers and torch",
        )


def _indented(record: Mapping[str, object]) -> str:
    """Return a record as indented strict JSON, with null for numbers that are not finite."""
    return json.dumps(json.loads(encode(record)), indent=2, ensure_ascii=False) + "\n"


def _results(of: Provenance) -> dict[str, object]:
    transformers = optional("transformers", _USE, EVALUATE)
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
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _card(network: TaskNetwork, of: Provenance) -> str:
    name = type(network.model).__name__
    fields: dict[str, object] = {
        "library_name": "transformers",
        "tags": ["maskfleet", network.config.model_type],
    }
    pipeline = next(
        (what for head, what in _PIPELINES.items() if name.endswith((head, f"{head}Simple"))), None
    )
    if pipeline is not None:
        fields["pipeline_tag"] = pipeline
    figures = ", ".join(f"{metric} {value:.4f}" for metric, value in of.outcome.metrics.items())
    use = (
        f"transformers loads it as `{name}`."
        if network.head is None
        else f"transformers loads the encoder as `{name}`; the head is in `{HEAD}` and `{HEAD_WEIGHTS}`, and "
        "`launcher.after.finetune.export.open_finetuned` reads both."
    )
    return (
        f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n\n# {of.task.name}\n\n"
        f"{one_line(of.start.name)}, fine-tuned on {of.task.name} with Maskfleet (seed {of.seed}). {use}\n\n"
        f"On its dev split after epoch {of.outcome.best_epoch}, which was chosen by it: {figures}. "
        f"Settings and curves are in `{RESULTS}`.\n"
    )
