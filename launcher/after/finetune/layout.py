"""At which depth of an encoder of transformers a parameter lies: in the embeddings, in a layer, or above the layers."""

import re
from dataclasses import dataclass

from torch import nn

from launcher.after.finetune.outcome import TaskMismatch

_LAYER = re.compile(
    r"(?:^|\.)(?:layer|layers|albert_layer_groups"
    r"|attentions|layer_norm[12]|ffns)\.(\d+)\."  # XLM's layers lie in four lists
)
_BELOW = (
    "embeddings.",
    "embed_tokens.",
    "embeddings_project.",
    "word_embedding.",
    "mask_emb",
    "position_embeddings.",  # XLM
    "lang_embeddings.",
    "layer_norm_emb.",
    "encoder.embedding_hidden_mapping_in.",  # ALBERT
    "encoder.rel_embeddings.",  # DeBERTa: every layer reads them, so they move no faster than the lowest does
    "encoder.LayerNorm.",  # of those, in v2 and v3
)
_BESIDE_FIRST = ("encoder.conv.",)  # DeBERTa v2's convolution works beside its first layer


@dataclass(frozen=True)
class LayerDepths:
    """Depths of an encoder's parameters: 0 for embeddings, 1 to `layers` for layers, `layers + 1` above them.

    Attributes:
        depths: by name.
        layers: with parameters of their own. ALBERT's layers have one set of them, so there it is 1.
        shared: the same parameters are used by several layers.
    """

    depths: dict[str, int]
    layers: int
    shared: bool

    def top(self, count: int) -> set[str]:
        """Names of the parameters of the `count` top layers, and of what is above. Raises TaskMismatch."""
        if not count:
            return set()
        if self.shared:
            raise TaskMismatch(
                "reinit_layers: this model's layers share their parameters, so all or none would begin anew",
                remedy="leave out reinit_layers",
            )
        if count > self.layers:
            raise TaskMismatch(
                f"reinit_layers {count} is more than the {self.layers} layers of this model",
                remedy=f"give at most {self.layers}",
            )
        return {name for name, depth in self.depths.items() if depth > self.layers - count}


def layout_of(encoder: nn.Module) -> LayerDepths:
    """Raises TaskMismatch: an encoder whose layers are not numbered as in the models that transformers has."""
    names = [name for name, _ in encoder.named_parameters()]
    numbers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
    if not numbers:
        raise TaskMismatch(
            f"{type(encoder).__name__} has no numbered layers, so it is no encoder that can be fine-tuned here",
            remedy="give an encoder of a family that can be trained here, or one built like it",
        )
    layers = max(numbers) + 1
    used = int(getattr(encoder.config, "num_hidden_layers", layers))
    return LayerDepths({name: _depth(name, layers) for name in names}, layers, shared=used > layers)


def _depth(name: str, layers: int) -> int:
    found = _LAYER.search(name)
    if found:
        return int(found[1]) + 1
    if name.startswith(_BESIDE_FIRST):
        return 1
    return 0 if name.startswith(_BELOW) else layers + 1
