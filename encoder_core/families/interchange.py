"""How a model is written in transformers' format: a table of parameter names that is read in both directions, and
config.json.

The pairs and fields that BERT-like classes share are at the end.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from encoder_core.errors import ModelError
from encoder_core.layers.sizes import Activation

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from torch import Tensor

Heads = Literal["mlm", "mlm_pair", "rtd", "plm", "denoise", "none"]
"""The heads on an encoder: a masked-language-model head, the same with a pair head, ELECTRA's detection head, XLNet's
head for permuted tokens, BART's decoder with its head, or none (of a BART: its decoder without a head)."""

ENCODER = "encoder."
"""The prefix of our names for an encoder's parameters; all other parameters belong to heads."""

_TIED_ENDINGS = {"encoder.embeddings.word.weight": ".weight", "head.decoder.bias": ".bias"}
_LEGACY_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm in weights converted from TensorFlow


@dataclass(frozen=True)
class TensorPart:
    """Where a parameter lies in a tensor that holds several.

    Attributes:
        height: number of rows of that tensor.
        rows: function that returns the rows that are the parameter's, in our order.
    """

    height: int
    rows: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class Pair:
    """One parameter under its two names. `{layer}` stands for the index of each layer, from `first_layer` on.

    `part`: where it lies in their tensor; None: it is the whole tensor.
    """

    ours: str
    theirs: str
    first_layer: int = 0
    part: TensorPart | None = None


@dataclass(frozen=True)
class Fold:
    """A table of transformers' class that we lack, and of which only row 0 is ever used.

    Importing adds that row to every row of `ours`, which gives the same sums; exporting writes one row of zeros.
    """

    theirs: str
    ours: str


@dataclass(frozen=True)
class KeyTable:
    """The parameters of one transformers class.

    Attributes:
        pairs: parameters that both sides have.
        tied: transformers' names for copies of the word embeddings (".weight") or of the decoder's bias (".bias"); see
            `copies`. We never store them.
        unused: transformers' names that we have no use for; we ignore them in a file.
        folds: tables to fold; see `Fold`.
        aliases: prefixes of names that other versions of the class write, each with the current prefix.
        zero: transformers' names for tensors that we lack and that must be zero, in a file that has them.
    """

    pairs: tuple[Pair, ...]
    tied: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    folds: tuple[Fold, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    zero: tuple[str, ...] = ()

    def names(self, layers: int) -> dict[str, str]:
        """Return our names to transformers' names, for a model with `layers` distinct layers."""
        return {ours: theirs for ours, (theirs, _) in self._expanded(layers).items()}

    def heights(self, layers: int) -> dict[str, int]:
        """Return the number of rows of their tensor, for each parameter of ours that is a part of one."""
        parts = self._expanded(layers).items()
        return {ours: part.height for ours, (_, part) in parts if part is not None}

    def unpack(
        self, read: "Callable[[str], Tensor]", matched: dict[str, str], layers: int
    ) -> "dict[str, Tensor]":
        """Return our parameters.

        Args:
            read: function that returns a stored tensor by its name.
            matched: our names to the stored names, as `match` returns them.

        Raises:
            ModelError: a tensor of several parameters has another number of rows.
        """
        found, expanded = {}, self._expanded(layers)
        for ours, stored in matched.items():
            tensor, (_, part) = read(stored), expanded[ours]
            if part is not None and tuple(tensor.shape[:1]) != (part.height,):
                raise ModelError(
                    f"{stored} is {tuple(tensor.shape)}, but must have {part.height} rows",
                    remedy="use the configuration and the weights of one and the same model",
                )
            found[ours] = tensor if part is None else tensor[list(part.rows())]
        return found

    def pack(self, read: "Callable[[str], Tensor]", layers: int) -> "dict[str, Tensor]":
        """Return their tensors, by their names: the inverse of `unpack`. `read` returns a parameter by our name."""
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
        """Return their name and the place in their tensor, by our name."""
        return {
            pair.ours.format(layer=i): (pair.theirs.format(layer=i), pair.part)
            for pair in self.pairs
            for i in (range(pair.first_layer, layers) if "{layer}" in pair.ours else (0,))
        }

    def encoder(self) -> "KeyTable":
        """Return the table without heads; heads in a file are then ignored."""
        heads = tuple(pair.theirs for pair in self.pairs if not pair.ours.startswith(ENCODER))
        pairs = tuple(pair for pair in self.pairs if pair.ours.startswith(ENCODER))
        return replace(self, pairs=pairs, tied=(), unused=(*self.unused, *self.tied, *heads))

    def copies(self, ours: str) -> list[str]:
        """Return further names under which a file may hold our parameter: as equal copies, or in place of its own."""
        ending = _TIED_ENDINGS.get(ours)
        return [name for name in self.tied if ending is not None and name.endswith(ending)]

    def match(self, present: Iterable[str], layers: int, where: str) -> dict[str, str]:
        """Return our names to the stored names, for the names `present` in a file, without folded tables.

        Raises:
            ModelError: a parameter is missing or unknown; the message names all such parameters.
        """
        stored = self.current_names(present)
        names = self.names(layers)
        found = self._stored_spellings(stored, names)
        _refuse([names[ours] for ours in names.keys() - found], self._unknown_names(stored, layers), where)
        return found

    def match_encoder(self, present: Iterable[str], layers: int, where: str) -> dict[str, str]:
        """Match as `match` does, for a class with other heads or none: heads may be missing, and foreign heads are
        ignored.

        Raises:
            ModelError: a parameter of the encoder is missing or unknown; the message names all such parameters.
        """
        stored = self.current_names(present)
        names = self.names(layers)
        found = self._stored_spellings(stored, names)
        missing = [names[ours] for ours in names.keys() - found if ours.startswith(ENCODER)]
        unknown = [name for name in self._unknown_names(stored, layers) if name.startswith(self._base)]
        _refuse(missing, unknown, where)
        return found

    def _stored_spellings(self, stored: dict[str, str], names: dict[str, str]) -> dict[str, str]:
        return {
            ours: next(stored[name] for name in spellings if name in stored)
            for ours, theirs in names.items()
            if not stored.keys().isdisjoint(spellings := [theirs, *self.copies(ours)])
        }

    @property
    def _base(self) -> str:
        """The prefix of an encoder's names in a class with heads, such as "bert."."""
        first = next(pair.theirs for pair in self.pairs if pair.ours.startswith(ENCODER))
        return f"{first.partition('.')[0]}."

    def current_names(self, present: Iterable[str]) -> dict[str, str]:
        """Return current names to stored names: old spellings are replaced, and a bare encoder's names get its
        prefix.
        """
        stored = {self._without_alias(current_name(name)): name for name in present}
        encoder = [theirs for ours, theirs in self.names(0).items() if ours.startswith(ENCODER)]
        bare = {theirs.removeprefix(self._base) for theirs in encoder}
        if not bare & stored.keys():
            return stored
        return {self._base + name: stored_name for name, stored_name in stored.items()}

    def _without_alias(self, name: str) -> str:
        for old, new in self.aliases:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def _unknown_names(self, stored: Iterable[str], layers: int) -> list[str]:
        names = self.names(layers).values()
        known = {*names, *self.tied, *self.unused, *self.zero, *(fold.theirs for fold in self.folds)}
        return [name for name in stored if name not in known]


@dataclass(frozen=True)
class HfNetwork:
    """One network in transformers' format: the class that loads it (None: transformers has none), its parameters' names
    and its config.json."""

    architecture: str | None
    table: KeyTable
    fields: dict[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A `model_type` of config.json.

    Attributes:
        encoder: name of the class that holds the encoder alone; None if transformers has no class for the family.
        read: function from the fields of config.json to our configuration. Raises ModelError if we cannot load the
            model.
    """

    model_type: str
    encoder: str | None
    read: Callable[[dict[str, Any]], Any]


def current_name(name: str) -> str:
    """Return the current name of a parameter that an old file may name differently."""
    for old, new in _LEGACY_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _refuse(missing: list[str], unknown: list[str], where: str) -> None:
    parts = [f"missing {', '.join(sorted(set(missing)))}"] if missing else []
    parts += [f"unknown {', '.join(sorted(unknown))}"] if unknown else []
    if parts:
        raise ModelError(
            f"{where} does not hold the expected parameters: {'; '.join(parts)}",
            remedy="give a folder saved from the class that its config.json names in `architectures`, "
            "heads included",
        )


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab": "vocab_size",
    "pad_id": "pad_token_id",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
}
"""Our configuration fields and theirs, where only the name differs."""

DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config.json is silent, the same for all these classes."""


def with_bias(ours: str, theirs: str) -> tuple[Pair, Pair]:
    """Return the weight and the bias of a Linear or LayerNorm."""
    return Pair(f"{ours}.weight", f"{theirs}.weight"), Pair(f"{ours}.bias", f"{theirs}.bias")


def layer_pairs(ours: str, theirs: str) -> tuple[Pair, ...]:
    """Return the pairs of a post-LayerNorm layer with BERT's names. Prefixes contain `{layer}` if there are several
    layers.
    """
    return (
        *with_bias(f"{ours}.attention.query", f"{theirs}.attention.self.query"),
        *with_bias(f"{ours}.attention.key", f"{theirs}.attention.self.key"),
        *with_bias(f"{ours}.attention.value", f"{theirs}.attention.self.value"),
        *with_bias(f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
        *with_bias(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *with_bias(f"{ours}.feed_forward.up", f"{theirs}.intermediate.dense"),
        *with_bias(f"{ours}.feed_forward.down", f"{theirs}.output.dense"),
        *with_bias(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm"),
    )


def embedding_pairs(ours: str, theirs: str) -> tuple[Pair, ...]:
    """Return the pairs of word and position tables and their LayerNorm."""
    return (
        Pair(f"{ours}.word.weight", f"{theirs}.word_embeddings.weight"),
        Pair(f"{ours}.position.weight", f"{theirs}.position_embeddings.weight"),
        *with_bias(f"{ours}.norm", f"{theirs}.LayerNorm"),
    )


class SharedFields(Protocol):
    """A configuration with the fields in `FIELDS`."""

    @property
    def activation(self) -> Activation: ...


def shared_to_json(config: SharedFields) -> dict[str, Any]:
    """Return the fields of config.json that all these classes share."""
    return {
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": activation_to_json(config.activation),
        "tie_word_embeddings": True,
    }


def shared_from_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return values for our configuration.

    Raises:
        ModelError: the model is a decoder, its decoder weights are not tied, or its activation is not supported.
    """
    fields = DEFAULTS | fields
    for flag in ("is_decoder", "add_cross_attention"):
        if fields.get(flag):
            raise ModelError(f"config.json: {flag} is true", remedy="only encoders can be loaded")
    check_tied(fields)
    values = {ours: fields[theirs] for ours, theirs in FIELDS.items()}
    return values | {"activation": activation_from_json(fields, "hidden_act")}


def activation_from_json(fields: dict[str, Any], key: str) -> Activation:
    """Return our name of the activation in `fields[key]`.

    Raises:
        ModelError: the activation is not supported.
    """
    if fields[key] not in ACTIVATIONS:
        raise unsupported(key, fields, f"use a model with one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[fields[key]]


def activation_to_json(activation: Activation) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def check_tied(fields: dict[str, Any]) -> None:
    """Check that the decoder is tied to the word embeddings.

    Raises:
        ModelError: the decoder has weights of its own.
    """
    if not fields["tie_word_embeddings"]:
        raise ModelError(
            "config.json: tie_word_embeddings is false",
            remedy="only models whose decoder is tied to the word embeddings can be loaded",
        )


def unsupported(key: str, fields: dict[str, Any], remedy: str) -> ModelError:
    """Return the error about a config.json whose `key` has a value that we do not support."""
    return ModelError(f"config.json: {key} is {fields.get(key)!r}, which is not supported", remedy=remedy)


def unpublished(key: str, fields: dict[str, Any], expected: object) -> ModelError:
    """Return the same where only weights of the published architecture are supported."""
    return unsupported(key, fields, f"use weights of the published architecture, whose {key} is {expected!r}")
