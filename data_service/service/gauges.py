"""Metrics gauges, exported to Prometheus by Ray's agent on each node if `ray[default]` is installed.

Ray adds labels of its own, such as the process (WorkerId) and the cluster (SessionName).
"""

import string
from collections.abc import Mapping
from urllib.parse import quote

from ray.util.metrics import Gauge

from data_service.store.retries import total_retries

METRIC_PREFIX = "maskfleet_"
"""Prefix of the name of every gauge. Ray puts `ray_` before it."""
_UNQUOTED_CHARACTERS = string.punctuation.replace("%", "") + " "  # label characters that are not percent-encoded
GAUGE_DESCRIPTIONS = {
    "windows_ready": "Windows of samples that are built and held for the ranks.",
    "store_retries": "Requests to object storage that this process has had to make again.",
}


def make_gauge(name: str, description: str, labels: Mapping[str, str], *variable_labels: str) -> Gauge:
    """Return a gauge of this process. `labels` have fixed values; `variable_labels` get theirs with each measurement.

    Ray accepts only printable ASCII in labels. Other characters of a fixed label are percent-encoded, as in a URI.
    """
    made = Gauge(METRIC_PREFIX + name, description, (*labels, *variable_labels))
    made.set_default_tags({label: quote(value, safe=_UNQUOTED_CHARACTERS) for label, value in labels.items()})
    return made


class StoreRetryGauge:
    """The gauge of this process's retried store requests. `update` sets it to the current number."""

    def __init__(self) -> None:
        self._gauge = make_gauge("store_retries", GAUGE_DESCRIPTIONS["store_retries"], {})

    def update(self) -> None:
        self._gauge.set(float(total_retries()))
