"""What trackers were told, read back through their own clients."""

import json
from pathlib import Path
from typing import Any

Values = dict[str, dict[int, float]]
"""By name and step: the last value."""


def wandb_records(folder: Path) -> list[Any]:
    """Of all offline runs in `folder`, in the order in which they were made, by W&B's own reader of its files."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    records = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        reader = DataStore()
        reader.open_for_scan(str(file))
        while (data := reader.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
    return records


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """The history, in order, W&B's own fields left out."""
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            named = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            rows.append({name: value for name, value in named.items() if not name.startswith("_")})
    return rows


def wandb_values(folder: Path) -> Values:
    values: Values = {}
    for row in wandb_rows(folder):
        for name in row.keys() - {"step"}:
            values.setdefault(name, {})[int(row["step"])] = row[name]
    return values


def mlflow_runs(uri: str, experiment: str = "maskfleet") -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id])) if found else []


def mlflow_values(uri: str) -> Values:
    from mlflow.tracking import MlflowClient

    (run,) = mlflow_runs(uri)
    values: Values = {}
    for name in run.data.metrics:
        history = MlflowClient(uri).get_metric_history(run.info.run_id, name)
        values[name] = {
            entry.step: entry.value for entry in sorted(history, key=lambda entry: entry.timestamp)
        }
    return values
