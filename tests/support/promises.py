"""What infra/docs/records.md promises to programs that read `--json`."""

import re
from pathlib import Path

RECORDS = Path(__file__).parents[2] / "infra/docs/records.md"


def promised(command: str) -> list[str]:
    """The keys in the command's line of the guide."""
    name = ", ".join(f"`{part}`" for part in command.split(", "))
    (line,) = [line for line in RECORDS.read_text().splitlines() if line.startswith(f"| {name} ")]
    return re.findall("`(.*?)`", line.split("|")[2].partition(";")[0])


def keys(found: list[dict[str, object]]) -> list[str]:
    """Of all records, which have the same."""
    assert found
    assert len({tuple(record) for record in found}) == 1
    return list(found[0])
