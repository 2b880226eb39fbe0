"""NeoBERT (Le Breton et al., 2025, arXiv 2502.19587): as wide as BERT base, and more than twice as deep.

Deep and narrow models use their parameters better (section 3.1): 28 layers of 768. Norms are RMSNorms before each
block, positions are rotary, and blocks are gated (SwiGLU) with two thirds of BERT's inner width, which gives equally
many parameters. Only the decoder has a bias; its weights are its own.

transformers has no class for it: an export names none. A folder has the names of the authors' code, except that
query, key and value (`q`, `k`, `v`) and the two halves of the gated block (`w1`, `w2`) are separate matrices here. The
authors' files have one matrix for each of the two groups, stored head by head, and their rotary positions rotate
neighbouring numbers. They are refused, because parameter names are missing there.
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.interchange import Format, Heads, KeyTable, Pair, Written
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.layers.sizes import Activation


class NeoBertConfig(PreNormConfig):
    """The configuration of a NeoBERT. See `PreNormConfig`.

    Attributes:
        rotary_base: base of the rotary positions of all layers.
    """

    family: Literal["neobert"] = "neobert"
    name: ClassVar[str] = "NeoBERT"
    recipe: ClassVar[str] = "neobert-base"
    max_length: int = Field(default=4096, gt=1)
    activation: Activation = "silu"
    rotary_base: float = Field(default=10_000.0, gt=0)

    @property
    def rms_norm(self) -> bool:
        return True

    @property
    def embedding_norm(self) -> bool:
        return False

    @property
    def fused(self) -> bool:
        return False

    @property
    def bare_head(self) -> bool:
        return True

    @property
    def decoder_bias(self) -> bool:
        return True

    @property
    def tied(self) -> bool:
        return False

    def rope_base(self, layer: int) -> float:
        return self.rotary_base

    def with_rope_base(self, base: float) -> Self:
        return self.model_copy(update={"rotary_base": base})

    def written(self, heads: Heads) -> Written | None:
        return Written(None, TABLE, to_json(self)) if heads == "mlm" else None

    @classmethod
    def formats(cls) -> tuple[Format, ...]:
        return (Format("neobert", None, from_json),)


BASE = NeoBertConfig(layers=28, hidden=768, heads=12, feed_forward=2048, vocab=30_522)

_OURS, _THEIRS = "encoder.layers.{layer}", "model.transformer_encoder.{layer}"
TABLE = KeyTable(
    pairs=(
        Pair("encoder.embeddings.word.weight", "model.encoder.weight"),
        Pair(f"{_OURS}.attention_norm.weight", f"{_THEIRS}.attention_norm.weight"),
        Pair(f"{_OURS}.attention.query.weight", f"{_THEIRS}.q.weight"),
        Pair(f"{_OURS}.attention.key.weight", f"{_THEIRS}.k.weight"),
        Pair(f"{_OURS}.attention.value.weight", f"{_THEIRS}.v.weight"),
        Pair(f"{_OURS}.attention.output.weight", f"{_THEIRS}.wo.weight"),
        Pair(f"{_OURS}.feed_forward_norm.weight", f"{_THEIRS}.ffn_norm.weight"),
        Pair(f"{_OURS}.feed_forward.gate.weight", f"{_THEIRS}.ffn.w1.weight"),
        Pair(f"{_OURS}.feed_forward.up.weight", f"{_THEIRS}.ffn.w2.weight"),
        Pair(f"{_OURS}.feed_forward.down.weight", f"{_THEIRS}.ffn.w3.weight"),
        Pair("encoder.final_norm.weight", "model.layer_norm.weight"),
        Pair("head.decoder.weight", "decoder.weight"),
        Pair("head.decoder.bias", "decoder.bias"),
    )
)

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "inner_size",
    "max_length": "max_length",
    "vocab": "vocab_size",
    "pad_id": "pad_token_id",
    "layer_norm_eps": "norm_eps",
    "initializer_range": "encoder_init_range",
    "rotary_base": "rope_theta",
}
"""Our configuration fields and theirs. `inner_size` is our name: the authors' `intermediate_size` is 1.5 times it."""


def to_json(config: NeoBertConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model.

    Raises:
        ModelError: the activation is not silu.
    """
    if config.activation != "silu":
        raise ModelError(
            f"model.activation is {config.activation}, but NeoBERT supports silu only",
            remedy="train with model.activation: silu to export",
        )
    return {
        "model_type": "neobert",
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "tie_word_embeddings": False,
    }


def from_json(fields: dict[str, Any]) -> NeoBertConfig:
    """Return our configuration for the fields of a config.json.

    Raises:
        ModelError: a field is missing.
    """
    missing = [theirs for theirs in FIELDS.values() if theirs not in fields]
    if missing:
        raise ModelError(
            f"config.json of a neobert lacks {', '.join(missing)}",
            remedy="give a folder that `maskfleet checkpoints export` wrote; the authors' own files cannot be read",
        )
    return NeoBertConfig(**{ours: fields[theirs] for ours, theirs in FIELDS.items()})
