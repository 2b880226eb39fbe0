"""A published model whose figures are known: ours beside those of sentence-transformers' own evaluator."""

import csv
import json
from pathlib import Path

from launcher.embed.evaluate import CellSettings, embed_cell
from launcher.extras import EVALUATE, optional
from launcher.finetune.pretrained import open_pretrained
from launcher.tasks.task import load_task

from .place import Place

FILE = "published.json"


def measure_published(place: Place, folder: Path) -> None:
    """Spearman's correlation on every STS file, by both, kept in `published.json`. Raises as `open_pretrained`."""
    kept = place.root / FILE
    if kept.exists():
        return
    found = {"model": folder.parent.name if folder.name == "model" else folder.name, "figures": {}}
    figures = found["figures"]
    assert isinstance(figures, dict)
    with open_pretrained(str(folder)) as pretrained:
        for file in sorted(place.tasks.glob("sts-*.yaml")):
            task = load_task(str(file))
            ours = embed_cell(pretrained, task, CellSettings(batch=64), seed=0)["spearman"]
            figures[task.name] = {
                "ours": ours,
                "theirs": theirs(folder, place.tasks / task.name / "test.tsv"),
            }
    kept.write_text(json.dumps(found, indent=1), "utf-8")


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
