"""A command that evaluates checkpoints with small cells, as a process of its own: `python grid_driver.py REQUEST`.

REQUEST is JSON: results, folder, noises, tasks, lrs, seeds, diary, seconds, cpus. Prints a line of JSON for each cell
that ends, then the table's.
"""

import json
import sys
from pathlib import Path

from small_cells import Fitting, checkpoints

from data_service.store.open import open_store
from launcher.evaluate.endings import Ended, Share
from launcher.evaluate.evaluation import Evaluation, plan
from launcher.evaluate.results import Results


def main(request: dict[str, object]) -> None:
    given = dict(request)
    models = checkpoints(Path(str(given["folder"])), given["noises"])  # type: ignore[arg-type]
    measures = [
        Fitting(task, lr, str(given["diary"]), float(given["seconds"]))  # type: ignore[arg-type]
        for task in given["tasks"]  # type: ignore[attr-defined]
        for lr in given["lrs"]  # type: ignore[attr-defined]
    ]
    works = plan(models, measures, given["seeds"])  # type: ignore[arg-type]
    evaluation = Evaluation(Results(open_store(str(given["results"]))), "small", works)
    say({"before": evaluation.before})
    for event in evaluation.compute(models, Share(cpus=float(given["cpus"]))):  # type: ignore[arg-type]
        if isinstance(event, Ended):
            say({"ended": event.work.cell.key, "failure": event.failure and event.failure.problem})
        else:
            say({"waiting": event.reason})
    if evaluation.trouble is not None:
        say({"trouble": evaluation.trouble.problem})
        sys.exit(75)
    say({"table": [row.model_dump(mode="json", exclude={"checkpoint"}) for row in evaluation.table()]})


def say(record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
