"""One microbatch as the model sees it, for counting: every row full, every row with as many targets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """R rows of L tokens with Q targets each.

    `places` that position tables are read at follow from the length; see `flops` and `activations`.
    """

    rows: int
    length: int
    targets_per_row: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def targets(self) -> int:
        return self.rows * self.targets_per_row
