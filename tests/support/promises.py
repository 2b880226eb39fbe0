"""What launcher/README.md promises to programs that read `--json`."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "launcher/README.md"


def promised(command: str) -> list[str]:
    """The keys in the command's line of the README."""
    name = ", ".join(f"`{part}`" for part in command.split(", "))
    (line,) = [line for line in README.read_text().splitlines() if line.startswith(f"| {name} ")]
    return re.findall("`(.*?)`", line.split("|")[2].partition(";")[0])


def keys(found: list[dict[str, object]]) -> list[str]:
    """Of all records, which have the same."""
    assert found
    assert len({tuple(record) for record in found}) == 1
    return list(found[0])
