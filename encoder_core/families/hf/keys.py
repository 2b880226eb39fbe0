"""Parameter names here and in transformers, as one declarative table read in both directions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from encoder_core.errors import ModelError

ENCODER = "encoder."
"""What our names of an encoder's parameters begin with; all others belong to heads."""

_LEGACY_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm in weights converted from TensorFlow


@dataclass(frozen=True)
class Pair:
    """One parameter under its two names. `{layer}` stands for each layer's index, from `first_layer` on."""

    ours: str
    theirs: str
    first_layer: int = 0


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
        aliases: beginnings of names that other versions of the class write, and what is written now.
    """

    pairs: tuple[Pair, ...]
    tied: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    folds: tuple[Fold, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def names(self, layers: int) -> dict[str, str]:
        """Ours to theirs, for a model with `layers` distinct layers."""
        names: dict[str, str] = {}
        for pair in self.pairs:
            repeats = range(pair.first_layer, layers) if "{layer}" in pair.ours else (0,)
            names |= {pair.ours.format(layer=i): pair.theirs.format(layer=i) for i in repeats}
        return names

    def encoder(self) -> "KeyTable":
        """The same without heads, which are passed over where a file has them."""
        heads = tuple(pair.theirs for pair in self.pairs if not pair.ours.startswith(ENCODER))
        pairs = tuple(pair for pair in self.pairs if pair.ours.startswith(ENCODER))
        return replace(self, pairs=pairs, tied=(), unused=(*self.unused, *self.tied, *heads))

    def match(self, present: Iterable[str], layers: int, where: str) -> dict[str, str]:
        """Ours to the stored name of theirs, for the names found in a file; folded tables are not in it.

        Raises ModelError naming every parameter that is missing or unknown.
        """
        stored = self.modern(present)
        names = self.names(layers)
        missing = [theirs for theirs in names.values() if theirs not in stored]
        _refuse(missing, self._unknown(stored, layers), where)
        return {ours: stored[theirs] for ours, theirs in names.items()}

    def match_encoder(self, present: Iterable[str], layers: int, where: str) -> dict[str, str]:
        """As `match`, for a class with other heads or none: heads may be missing, and foreign ones are passed over.

        Raises ModelError naming every parameter of the encoder that is missing or unknown.
        """
        stored = self.modern(present)
        names = self.names(layers)
        missing = [
            theirs for ours, theirs in names.items() if theirs not in stored and ours.startswith(ENCODER)
        ]
        unknown = [name for name in self._unknown(stored, layers) if name.startswith(self._base)]
        _refuse(missing, unknown, where)
        return {ours: stored[theirs] for ours, theirs in names.items() if theirs in stored}

    @property
    def _base(self) -> str:
        """What their encoder's names begin with in a class that has heads, such as "bert."."""
        first = next(pair.theirs for pair in self.pairs if pair.ours.startswith(ENCODER))
        return f"{first.partition('.')[0]}."

    def modern(self, present: Iterable[str]) -> dict[str, str]:
        """Present names to stored ones: old spellings replaced, and the encoder's beginning put before a bare one."""
        stored = {self._renamed(modern_name(name)): name for name in present}
        encoder = [theirs for ours, theirs in self.names(0).items() if ours.startswith(ENCODER)]
        bare = {theirs.removeprefix(self._base) for theirs in encoder}
        if not bare & stored.keys():
            return stored
        return {self._base + name: stored_name for name, stored_name in stored.items()}

    def _renamed(self, name: str) -> str:
        for old, new in self.aliases:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def _unknown(self, stored: Iterable[str], layers: int) -> list[str]:
        names = self.names(layers).values()
        known = {*names, *self.tied, *self.unused, *(fold.theirs for fold in self.folds)}
        return [name for name in stored if name not in known]


def modern_name(name: str) -> str:
    """The present name of a parameter that an old file may call otherwise."""
    for old, new in _LEGACY_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _refuse(missing: list[str], unknown: list[str], where: str) -> None:
    parts = [f"missing {', '.join(sorted(missing))}"] if missing else []
    parts += [f"unknown {', '.join(sorted(unknown))}"] if unknown else []
    if parts:
        raise ModelError(
            f"{where} does not hold the expected parameters: {'; '.join(parts)}",
            remedy="give a folder saved from the class that its config.json names in `architectures`, "
            "heads included",
        )
