"""Parameter names here and in transformers, as one declarative table read in both directions."""

from collections.abc import Iterable
from dataclasses import dataclass

from encoder_core.errors import ModelError

_LEGACY_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm in weights converted from TensorFlow


@dataclass(frozen=True)
class Pair:
    """One parameter under its two names. `{layer}` stands for each layer's index."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Fold:
    """A table of theirs that we lack, and of which only row 0 is ever used.

    Importing adds that row to every row of `ours`, which gives the same sums; exporting writes one row of
    zeros.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class KeyTable:
    """The parameters of one transformers class.

    Attributes:
        pairs: what both sides have.
        tied: names of theirs for a tensor that `pairs` already covers; never stored by us, ignored when met.
        unused: names of theirs that we have no use for; ignored when met.
        folds: see `Fold`.
    """

    pairs: tuple[Pair, ...]
    tied: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    folds: tuple[Fold, ...] = ()

    def names(self, layers: int) -> dict[str, str]:
        """Ours to theirs, for a model with `layers` distinct layers."""
        names: dict[str, str] = {}
        for pair in self.pairs:
            repeats = range(layers) if "{layer}" in pair.ours else (0,)
            names |= {pair.ours.format(layer=i): pair.theirs.format(layer=i) for i in repeats}
        return names

    def match(self, present: Iterable[str], layers: int, where: str) -> dict[str, str]:
        """Ours to the stored name of theirs, for the names found in a file; folded tables are not in it.

        Raises ModelError naming every parameter that is missing or unknown.
        """
        stored = {modern_name(name): name for name in present}
        names = self.names(layers)
        known = {*names.values(), *self.tied, *self.unused, *(fold.theirs for fold in self.folds)}
        missing = sorted(set(names.values()) - set(stored))
        unknown = sorted(set(stored) - known)
        if missing or unknown:
            raise ModelError(
                f"{where} does not hold the expected parameters: {_list('missing', missing, unknown)}",
                remedy="give a folder saved from the class that its config.json names in `architectures`, "
                "heads included",
            )
        return {ours: stored[theirs] for ours, theirs in names.items()}


def modern_name(name: str) -> str:
    """The present name of a parameter that an old file may call otherwise."""
    for old, new in _LEGACY_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _list(first: str, missing: list[str], unknown: list[str]) -> str:
    parts = [f"{first} {', '.join(missing)}"] if missing else []
    return "; ".join(parts + ([f"unknown {', '.join(unknown)}"] if unknown else []))
