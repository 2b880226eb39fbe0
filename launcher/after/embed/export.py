"""A trained embedding model as the folder that `SentenceTransformer(...)` loads, with a model card."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from checkpoints.hf.export import CARD, published
from checkpoints.hf.folder import removable
from data_service.printable import one_line
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EmbedTraining, Encoding
from launcher.after.embed.train import Trained
from launcher.after.finetune.pretrained import LocalModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def check_target(out: str) -> None:
    """Raise ExportError if `out` holds files that no export wrote. Call this before hours of training."""
    removable(open_store(out))


def export_embeddings(
    trained: Trained, pretrained: LocalModel, training: EmbedTraining, out: str, licence: str | None = None
) -> None:
    """Write the model to the folder or s3:// URI `out`, whole or not at all; an earlier export there is replaced.

    The export is loaded again and compared bit for bit. `licence`: licence of the model for the card.

    Raises ExportError if `out` holds something else, ModelError if the export does not read back, and StoreError.
    """
    with published(open_store(out)) as folder:
        trained.model.save_pretrained(str(folder), create_model_card=False)
        card = _card(trained, pretrained, training, licence)
        (folder / CARD).write_text(card, encoding="utf-8")
        _compare(trained.model, folder)


def _compare(model: "SentenceTransformer", folder: Path) -> None:
    written = load_model(LocalModel(str(folder), None, folder, ""), Encoding())
    theirs = {name: weight.cpu() for name, weight in written.state_dict().items()}
    for name, weight in model.state_dict().items():
        if name not in theirs or not torch.equal(theirs[name], weight.cpu()):
            raise ModelError(
                f"{name} does not read back from the export as it was written",
                remedy="check the disk that holds the temporary folder, and export again",
            )


def _card(trained: Trained, pretrained: LocalModel, training: EmbedTraining, licence: str | None) -> str:
    model = trained.model
    fields: dict[str, object] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["maskfleet", "sentence-transformers"],
    }
    if licence:
        fields["license"] = licence
    figures = [f"| {name} | {100 * value:.2f} |" for name, value in sorted(trained.dev.items())]
    measured = ["## Measured on dev", "", "| | x 100 |", "|---|---|", *figures, ""] if figures else []
    settings = yaml.safe_dump(json.loads(training.model_dump_json()), sort_keys=False, allow_unicode=True)
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(fields, sort_keys=True)}---",
            "",
            "# Sentence embeddings",
            "",
            f"Vectors of {model.get_embedding_dimension()} numbers for texts of up to {model.max_seq_length} tokens; "
            "compare them by their cosine.",
            "",
            "```python",
            "from sentence_transformers import SentenceTransformer",
            "",
            'model = SentenceTransformer("THIS_FOLDER")',
            'vectors = model.encode(["A sentence.", "Another one."])',
            "print(model.similarity(vectors, vectors))",
            "```",
            "",
            *_prompts(model),
            "## Training",
            "",
            f"From {one_line(pretrained.name)} (SHA-256 {pretrained.digest[:12]}), {trained.rows:,} rows, "
            f"{trained.steps:,} steps, by `maskfleet embed train`.",
            "",
            *measured,
            "## Licence",
            "",
            one_line(licence) if licence else "Not stated by who exported the model.",
            "",
            f"## Settings\n\n```yaml\n{settings}```",
            "",
        ]
    )


def _prompts(model: "SentenceTransformer") -> list[str]:
    found = [f"- `{name}`: `{one_line(text)}`" for name, text in sorted(model.prompts.items()) if text]
    return ["Prompts, chosen by `prompt_name`:", "", *found, ""] if found else []
