"""Whether the figures that a command prints can be true: every number with a unit that it knows, in its range."""

import re
from collections import Counter

UNSHOWN_FIELDS = (
    "step",
    "tokens",
    "targets",
    "skipped",
    "data_wait",
    "copy_seconds",
    "copy_bytes",
    "samples",
    "digest",
)
"""The fields of a step's record that no display shows."""
_NUMBER = r"(-?[\d,.]+(?:e[+-]?\d+)?|nan|inf)"
_RANGES = {
    rf"step {_NUMBER}/": (0, 1e9),
    rf"(?:mlm|nsp|sop|sbo|rtd|plm) {_NUMBER}": (0, 30),  # nats a target
    rf"perplexity {_NUMBER}": (1, 1e9),
    rf"{_NUMBER}[kM]? tokens/s": (0.1, 1e6),  # its number, before the unit
    rf"data wait {_NUMBER}%": (0, 100),
    rf"MFU {_NUMBER}%": (0, 100),
    rf"ETA {_NUMBER}": (0, 10_000),
    rf"after {_NUMBER} s": (0.1, 10_000),
    rf"{_NUMBER} nats": (0, 30),
    rf"{_NUMBER} s of installation": (0, 10_000),
    rf"goodput {_NUMBER}%": (0, 100),
    rf"accuracy {_NUMBER}": (0, 100),
}


def ensure_possible(output: str) -> Counter[str]:
    """How often each kind of figure was seen, by its pattern. A number that cannot be is an AssertionError."""
    seen: Counter[str] = Counter()
    for pattern, (low, high) in _RANGES.items():
        for found in re.finditer(pattern, output):
            value = float(found[1].rstrip(".,").replace(",", ""))
            assert low <= value <= high, f"{found[0]!r} in {output[max(0, found.start() - 80) : found.end() + 80]!r}"
            seen[pattern] += 1
    for percent in re.findall(rf"{_NUMBER}%", output):
        assert 0 <= float(percent.replace(",", "")) <= 100, f"{percent}%"
        seen["%"] += 1
    return seen
