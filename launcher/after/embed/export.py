"""A trained embedding model as the folder that `SentenceTransformer(...)` loads, with a model card."""

import json
from typing import TYPE_CHECKING

import yaml

from checkpoints.hf.export import MODEL_CARD, publish_on_exit
from data_service.printable import one_line
from data_service.store.open import open_store
from launcher.after.embed.settings import EmbedTraining
from launcher.after.embed.train import Trained
from launcher.after.finetune.pretrained import LocalModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def export_embeddings(
    trained: Trained, pretrained: LocalModel, training: EmbedTraining, out: str, licence: str | None = None
) -> None:
    """Write the model to the folder or s3:// URI `out`, whole or not at all; an earlier export there is replaced.

    `licence`: licence of the model for the card. Raises ExportError if `out` holds something else, and StoreError.
    """
    with publish_on_exit(open_store(out)) as folder:
        trained.model.save_pretrained(str(folder), create_model_card=False)
        card = _card(trained, pretrained, training, licence)
        (folder / MODEL_CARD).write_text(card, encoding="utf-8")


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
