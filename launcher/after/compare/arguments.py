"""Parses the options of a comparison: recipes with labels, settings of one or of all, a budget."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.errors import OptionError
from launcher.output import human_count

Unit = Literal["tokens", "flops"]
_WRITTEN = re.compile(r"(tokens|flops)=(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([kMGBTPE]?)")
_LABELLED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.DOTALL)
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


@dataclass(frozen=True)
class Budget:
    """A number of tokens or FLOPs for every run."""

    unit: Unit
    amount: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Return the budget in a text such as `tokens=8M` or `flops=2.5e15`. Raises OptionError."""
        found = _WRITTEN.fullmatch(text)
        if found is None or not float(found[2]):
            raise OptionError(
                f"--budget {text}: no budget",
                remedy="write tokens=8M or flops=2.5e15 (k, M, G or B, T, P and E are understood)",
            )
        unit: Unit = "tokens" if found[1] == "tokens" else "flops"
        return cls(unit, float(found[2]) * _SCALES[found[3]])

    def __str__(self) -> str:
        return f"{human_count(self.amount)} {'tokens' if self.unit == 'tokens' else 'FLOPs'}"


def parse_labelled(text: str) -> tuple[str, str]:
    """Return label and recipe of `[LABEL=]RECIPE`. The default label is the file's name. Raises OptionError."""
    found = _LABELLED.fullmatch(text)
    label, recipe = (found[1], found[2]) if found else (Path(text).name.removesuffix(".yaml"), text)
    if not _LABELLED.fullmatch(f"{label}=x"):
        raise OptionError(f"{text}: {label!r} is no label", remedy="write LABEL=RECIPE, as static=mine.yaml")
    return label, recipe


def settings_of(label: str, assignments: Iterable[str], labels: Iterable[str]) -> list[str]:
    """Return the `[LABEL:]KEY=VALUE` that are for everybody or for `label`, in their order and without the label.

    Raises OptionError if one has an unknown label.
    """
    known, chosen = set(labels), []
    for text in assignments:
        key = text.partition("=")[0]
        owner, colon, _ = key.partition(":")
        if colon and owner not in known:
            raise OptionError(
                f"--set {text}: no recipe is called {owner}", remedy=f"labels: {', '.join(known)}"
            )
        if not colon or owner == label:
            chosen.append(text[len(owner) + 1 :] if colon else text)
    return chosen
