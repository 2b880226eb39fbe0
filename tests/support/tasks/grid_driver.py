"""A command that evaluates checkpoints with small cells, as a process of its own.

`python -m tests.support.tasks.grid_driver REQUEST`. REQUEST is JSON: results, folder, noises, tasks, lrs, seeds, diary,
seconds, cpus. Prints a line of JSON for each cell that ends, then the table's.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_service.store.open import open_store
from launcher.after.evaluate.cell import CellWork, Results
from launcher.after.evaluate.compute_cell import CellResources, Ended
from launcher.after.evaluate.evaluation import GridEvaluation, plan
from launcher.after.finetune.pretrained import LocalModel
from tests.support.tasks.small_cells import Fitting, checkpoints


def asked(given: Mapping[str, Any]) -> tuple[list[LocalModel], list[CellWork]]:
    """The checkpoints and cells of a request."""
    models = checkpoints(Path(given["folder"]), given["noises"])
    measures = [
        Fitting(task, lr, given["diary"], given["seconds"]) for task in given["tasks"] for lr in given["lrs"]
    ]
    return models, plan(models, measures, given["seeds"])


def main(given: Mapping[str, Any]) -> None:
    models, works = asked(given)
    evaluation = GridEvaluation(Results(open_store(given["results"])), "small", works)
    say({"before": evaluation.before})
    for event in evaluation.compute(models, CellResources(cpus=given["cpus"])):
        if isinstance(event, Ended):
            say({"ended": event.work.cell.key, "failure": event.failure and event.failure.problem})
        else:
            say({"waiting": event.reason})
    if evaluation.trouble is not None:
        say({"trouble": evaluation.trouble.problem})
        sys.exit(75)
    say({"table": [row.model_dump(mode="json") for row in evaluation.table()]})


def say(record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
