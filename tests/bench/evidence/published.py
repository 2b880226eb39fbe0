"""A published model whose figures are known: ours beside those of sentence-transformers' own evaluator."""

import csv
from pathlib import Path

from pydantic import BaseModel

from launcher.after.embed.evaluate import CellSettings, embed_cell
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.tasks.task import load_task
from launcher.errors import EVALUATE, optional

from .place import Place

_FILE = "published.json"


class Both(BaseModel):
    """Spearman's correlation of one file, by our evaluation and by theirs."""

    ours: float
    theirs: float


class Published(BaseModel):
    """The name of the model's folder, and figures by task."""

    model: str
    figures: dict[str, Both]


def measure_published(place: Place, folder: Path) -> None:
    """Every STS file, once. Raises as `open_pretrained`."""
    if read_published(place) is not None:
        return
    figures = {}
    with open_pretrained(str(folder)) as pretrained:
        for file in sorted(place.tasks.glob("sts-*.yaml")):
            task = load_task(str(file))
            ours = embed_cell(pretrained, task, CellSettings(batch=64), seed=0)["spearman"]
            figures[task.name] = Both(ours=ours, theirs=theirs(folder, place.tasks / task.name / "test.tsv"))
    name = folder.parent.name if folder.name == "model" else folder.name
    (place.root / _FILE).write_text(Published(model=name, figures=figures).model_dump_json(indent=1), "utf-8")


def read_published(place: Place) -> Published | None:
    """What was measured; None if nothing was."""
    path = place.root / _FILE
    return Published.model_validate_json(path.read_bytes()) if path.exists() else None


def theirs(model: Path, file: Path) -> float:
    """By sentence-transformers alone, the file read here."""
    library = optional("sentence_transformers", "the evidence page", EVALUATE)
    evaluation = optional(
        "sentence_transformers.sentence_transformer.evaluation", "the evidence page", EVALUATE
    )
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row[0]]
    evaluator = evaluation.EmbeddingSimilarityEvaluator(
        [row[1] for row in rows], [row[2] for row in rows], [float(row[0]) for row in rows]
    )
    return float(evaluator(library.SentenceTransformer(str(model), device="cpu"))["spearman_cosine"])
