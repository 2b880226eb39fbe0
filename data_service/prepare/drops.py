"""The decision to leave a document out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drop:
    """The decision to leave a document out. `reason`: kind of reason; `detail`: the values behind it."""

    reason: str
    detail: str = ""
