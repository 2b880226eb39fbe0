"""Where everything of a comparison lies, and what it was asked for."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launcher.errors import RunError

from .settings import Comparison, Family, read_comparison


@dataclass(frozen=True)
class Place:
    """The folder of a comparison.

    Attributes:
        root: everything is below it.
        comparison_file: the YAML that says what is compared.
    """

    root: Path
    comparison_file: Path

    @cached_property
    def comparison(self) -> Comparison:
        return read_comparison(self.comparison_file)

    def family(self, name: str) -> Family:
        """Raises RunError: the comparison has no such family."""
        if name not in self.comparison.families:
            raise RunError(
                f"{self.comparison_file} has no family {name}",
                remedy=f"it has: {', '.join(self.comparison.families)}",
            )
        return self.comparison.families[name]

    @property
    def text(self) -> Path:
        """`technical/` and `reviews/`, documents to train on; `pairs/`, a heading and what stands under it."""
        return self.root / "text"

    @property
    def tasks(self) -> Path:
        """A YAML for each task, and its files beside it."""
        return self.root / "tasks"

    def vocabulary(self, family: Family) -> Path:
        """Of the kind of tokenizer that the family has: `tokenizer/`, and a corpus for each kind of text."""
        return self.root / "vocabularies" / f"{family.tokenizer}-{family.specials or 'usual'}"

    def run(self, family: str, seed: int) -> Path:
        return self.root / "runs" / f"{family}-{seed}"

    def untrained(self, family: str, seed: int) -> Path:
        """The weights that the run begins with, in the transformers format."""
        return self.root / "untrained" / f"{family}-{seed}"

    @property
    def results(self) -> Path:
        """Cells of the grid."""
        return self.root / "results"
