"""Tables that map a model's parameter names to transformers' format and back.

The pairs of names that BERT-like classes share are at the end. `config_json.py` does the same for config.json.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from encoder_core.errors import ModelError

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from torch import Tensor

Heads = Literal["mlm", "mlm_pair", "rtd", "plm", "denoise", "none"]
"""The heads on an encoder: a masked-language-model head, the same with a pair head, ELECTRA's detection head, XLNet's
head for permuted tokens, BART's decoder with its head, or no head (for BART: the decoder without a head)."""

ENCODER_PREFIX = "encoder."
"""Prefix of our names of an encoder's parameters; all other parameters belong to heads."""
OUR_LAYER = "encoder.layers.{layer}"  # prefix of our names of a layer's parameters

# By our name of a parameter, the ending of transformers' names of its copies (`KeyTable.tied`).
_TIED_ENDINGS = {"encoder.embeddings.word.weight": ".weight", "head.decoder.bias": ".bias"}
_LEGACY_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm in weights converted from TensorFlow


@dataclass(frozen=True)
class TensorPart:
    """The position of a parameter in a transformers tensor that packs several parameters.

    Attributes:
        height: number of rows of the whole tensor.
        rows: function that returns the indices of the parameter's rows in the tensor, in the order of our rows.
    """

    height: int
    rows: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class NamePair:
    """A parameter's name here and in transformers. `{layer}`: the index of each layer, from `first_layer` on.

    `part`: the parameter's position in transformers' tensor; None: it is the whole tensor.
    """

    ours: str
    theirs: str
    first_layer: int = 0
    part: TensorPart | None = None


@dataclass(frozen=True)
class FoldedTable:
    """An embedding table of transformers' class that we lack, and of which only row 0 is ever used.

    Importing adds row 0 to every row of our table `ours`, so sums of embeddings are the same. Exporting writes zeros.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class KeyTable:
    """The parameters of a transformers class, and our names of them.

    Attributes:
        pairs: parameters that both sides have.
        tied: transformers' names of copies of the word embeddings (".weight") or of the decoder's bias (".bias"); see
            `tied_copies`. We never store copies.
        unused: transformers' names of tensors that we ignore in a file.
        folds: embedding tables that we add to another table; see `FoldedTable`.
        aliases: (prefix that other versions of the class write, current prefix).
        zero: transformers' names of tensors that we lack; if a file has them, they must be zero.
    """

    pairs: tuple[NamePair, ...]
    tied: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    folds: tuple[FoldedTable, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    zero: tuple[str, ...] = ()

    def their_names(self, layers: int) -> dict[str, str]:
        """Return transformers' names by our names, for a model with `layers` distinct layers."""
        return {ours: theirs for ours, (theirs, _) in self._expanded(layers).items()}

    def heights(self, layers: int) -> dict[str, int]:
        """Return by our names, for parameters that are packed in a larger tensor, the tensor's number of rows."""
        parts = self._expanded(layers).items()
        return {ours: part.height for ours, (_, part) in parts if part is not None}

    def unpack(self, read: "Callable[[str], Tensor]", matched: dict[str, str], layers: int) -> "dict[str, Tensor]":
        """Read our parameters, by our names, from a file in transformers' format.

        Args:
            read: function that returns a stored tensor by its name.
            matched: stored names by our names, from `match`.

        Raises:
            ModelError: a tensor that packs several parameters has a wrong number of rows.
        """
        found, expanded = {}, self._expanded(layers)
        for ours, stored in matched.items():
            tensor, (_, part) = read(stored), expanded[ours]
            if part is not None and tuple(tensor.shape[:1]) != (part.height,):
                raise ModelError(
                    f"{stored} is {tuple(tensor.shape)}, but must have {part.height} rows",
                    remedy="use the config.json and the weights of the same model",
                )
            found[ours] = tensor if part is None else tensor[list(part.rows())]
        return found

    def pack(self, read: "Callable[[str], Tensor]", layers: int) -> "dict[str, Tensor]":
        """Return transformers' tensors by name; the inverse of `unpack`. `read`: returns a parameter by our name."""
        found: dict[str, Tensor] = {}
        for ours, (theirs, part) in self._expanded(layers).items():
            tensor = read(ours)
            if part is None:
                found[theirs] = tensor
                continue
            if theirs not in found:
                found[theirs] = tensor.new_empty((part.height, *tensor.shape[1:]))
            found[theirs][list(part.rows())] = tensor
        return found

    def _expanded(self, layers: int) -> dict[str, tuple[str, TensorPart | None]]:
        """Return, by our name of each parameter of every layer, transformers' name and the part of the tensor."""
        return {
            pair.ours.format(layer=i): (pair.theirs.format(layer=i), pair.part)
            for pair in self.pairs
            for i in (range(pair.first_layer, layers) if "{layer}" in pair.ours else (0,))
        }

    def without_heads(self) -> "KeyTable":
        """Return the table of the encoder alone, which ignores heads in a file."""
        heads = tuple(pair.theirs for pair in self.pairs if not pair.ours.startswith(ENCODER_PREFIX))
        pairs = tuple(pair for pair in self.pairs if pair.ours.startswith(ENCODER_PREFIX))
        return replace(self, pairs=pairs, tied=(), unused=(*self.unused, *self.tied, *heads))

    def tied_copies(self, our_name: str) -> list[str]:
        """Return transformers' names of copies of our parameter, which a file may have in addition or instead."""
        ending = _TIED_ENDINGS.get(our_name)
        return [name for name in self.tied if ending is not None and name.endswith(ending)]

    def match(self, present: Iterable[str], layers: int, where: str, *, any_heads: bool = False) -> dict[str, str]:
        """Return stored names by our names, given the names `present` in the file `where`. Folded tables are left out.

        `any_heads`: the file may have other heads or none; missing heads are accepted, and unknown heads ignored.

        Raises:
            ModelError: a parameter is missing or unknown; the message names all such parameters.
        """
        stored, names = self.current_names(present), self.their_names(layers)
        found = {
            ours: next(stored[name] for name in spellings if name in stored)
            for ours, theirs in names.items()
            if not stored.keys().isdisjoint(spellings := [theirs, *self.tied_copies(ours)])
        }
        missing, unknown = names.keys() - found, self._unknown_names(stored, layers)
        if any_heads:
            missing = {ours for ours in missing if ours.startswith(ENCODER_PREFIX)}
            unknown = [name for name in unknown if name.startswith(self._encoder_prefix)]
        parts = [f"missing {', '.join(sorted({names[ours] for ours in missing}))}"] if missing else []
        parts += [f"unknown {', '.join(sorted(unknown))}"] if unknown else []
        if parts:
            remedy = "use a folder saved, with its heads, from the class that `architectures` in its config.json names"
            raise ModelError(f"{where} does not hold the expected parameters: {'; '.join(parts)}", remedy=remedy)
        return found

    @property
    def _encoder_prefix(self) -> str:
        """The prefix of encoder parameters in transformers' classes with heads, such as "bert."."""
        first = next(pair.theirs for pair in self.pairs if pair.ours.startswith(ENCODER_PREFIX))
        return f"{first.partition('.')[0]}."

    def current_names(self, present: Iterable[str]) -> dict[str, str]:
        """Return stored names by current names: old spellings are replaced, and if a file has the encoder alone, its
        names get the encoder's prefix."""
        stored = {self._without_alias(current_name(name)): name for name in present}
        encoder = [theirs for ours, theirs in self.their_names(0).items() if ours.startswith(ENCODER_PREFIX)]
        bare = {theirs.removeprefix(self._encoder_prefix) for theirs in encoder}
        if not bare & stored.keys():
            return stored
        return {self._encoder_prefix + name: stored_name for name, stored_name in stored.items()}

    def _without_alias(self, name: str) -> str:
        """Replace an alias at the beginning of a name by the current prefix."""
        for old, new in self.aliases:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def _unknown_names(self, stored: Iterable[str], layers: int) -> list[str]:
        names = self.their_names(layers).values()
        known = {*names, *self.tied, *self.unused, *self.zero, *(fold.theirs for fold in self.folds)}
        return [name for name in stored if name not in known]


@dataclass(frozen=True)
class HfNetwork:
    """A network in transformers' format: its class (None: transformers has none), the names of its parameters, and the
    fields of its config.json."""

    architecture: str | None
    table: KeyTable
    fields: dict[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model type that we can load.

    Attributes:
        model_type: the value of `model_type` in config.json.
        encoder: name of transformers' class of the encoder alone; None: transformers has no class for the family.
        read: function from the fields of config.json to our configuration. Raises ModelError if we cannot load the
            model.
    """

    model_type: str
    encoder: str | None
    read: Callable[[dict[str, Any]], Any]


def current_name(name: str) -> str:
    """Return a parameter's current name, given its name in an old or new file."""
    for old, new in _LEGACY_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def weight_and_bias(our_module: str, their_module: str) -> tuple[NamePair, NamePair]:
    """Return the pairs of names of a module's weight and bias."""
    weight, bias = (NamePair(f"{our_module}.{kind}", f"{their_module}.{kind}") for kind in ("weight", "bias"))
    return weight, bias


_LAYER = (
    *("attention.query", "attention.key", "attention.value", "attention.output", "attention_norm"),
    *("feed_forward.up", "feed_forward.down", "feed_forward_norm"),
)
"""Our names for the modules of a post-LayerNorm layer."""
BERT_LAYER = (  # transformers' names for the same modules of a BERT layer
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)


def layer_pairs(their_prefix: str, names: Sequence[str] = BERT_LAYER) -> tuple[NamePair, ...]:
    """Return the pairs of names of an encoder's post-LayerNorm layers. `names`: transformers', after `their_prefix`, of
    attention's query, key, value, output and norm, and of the feed-forward block's two Linears and norm.
    """
    named = zip(_LAYER, names, strict=True)
    return tuple(p for own, name in named for p in weight_and_bias(f"{OUR_LAYER}.{own}", f"{their_prefix}.{name}"))


def embedding_pairs(their_prefix: str, *, token_types: bool = False) -> tuple[NamePair, ...]:
    """Return the pairs of names of the word and position tables, their LayerNorm and, if any, the token types."""
    ours = "encoder.embeddings"
    segments = (NamePair(f"{ours}.token_type.weight", f"{their_prefix}.token_type_embeddings.weight"),)
    return (
        NamePair(f"{ours}.word.weight", f"{their_prefix}.word_embeddings.weight"),
        NamePair(f"{ours}.position.weight", f"{their_prefix}.position_embeddings.weight"),
        *weight_and_bias(f"{ours}.norm", f"{their_prefix}.LayerNorm"),
        *(segments if token_types else ()),
    )
