"""An exported folder's network in transformers' classes, with the names of inputs and outputs that servers expect.

Shapes: R rows, L tokens in each, with padding; H hidden.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from checkpoints.hf.folder import CONFIG
from checkpoints.hf.load import parse_json_object, read_folder_config, weights_for
from encoder_core.families.catalogue import ModelConfig, embedded_languages, hf_equivalent, hf_format_of
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EncodingSettings
from launcher.after.export.sentence_transformer import MODULES_FILE
from launcher.after.finetune.model import load_weights
from launcher.after.finetune.pretrained import LocalModel
from launcher.errors import import_optional

ONNX_PURPOSE, ONNX_EXTRA = "an ONNX graph", "onnx"  # for `import_optional`: what needs a package, and the pip extra
_TOKEN_HEAD_SUFFIXES = ("ForMaskedLM", "ForPreTraining", "XLMWithLMHeadModel")
"""Endings of the names of classes whose heads score every token. XLNet's class is left out, because its head needs
states that do not see their own token."""
GraphInputs = dict[str, Tensor]
"""Inputs of a graph by name, each [R, L] int64."""


class ServedNetwork(nn.Module):
    """A network that is called with a graph's inputs and returns its outputs, in the order of their names.

    Attributes:
        inputs: `input_ids`, `attention_mask`; `token_type_ids` if the model has several types; `langs` for an XLM.
        outputs: `last_hidden_state` [R, L, H]; then `sentence_embedding` [R, width] of a SentenceTransformer, or
            `logits` [R, L, vocabulary] of a language-model head, [R, L] of a detection head.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, pooling: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.model, self.pooling = model, nn.ModuleList(pooling)
        typed = config.takes_token_types or (config.segment_count or 0) > 1
        self.inputs = ("input_ids", "attention_mask", *["token_type_ids"] * typed)
        self.inputs += ("langs",) if embedded_languages(config) else ()
        # XLNet's class computes 1.0 - mask, which torch's exporter cannot write for integers.
        self.floating_mask = config.permutes
        self.headed = type(model).__name__.endswith(_TOKEN_HEAD_SUFFIXES)
        own = ("sentence_embedding",) if pooling else ("logits",) if self.headed else ()
        self.outputs = ("last_hidden_state", *own)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        langs: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        mask = attention_mask.float() if self.floating_mask else attention_mask
        given = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "token_type_ids": token_type_ids,
            "langs": langs,
        }
        inputs = {name: given[name] for name in self.inputs}
        if not self.headed:
            states = self.model(**inputs).last_hidden_state
            return (states, *self._sentence_vector(states, attention_mask))
        found = self.model(**inputs, output_hidden_states=True)
        scores = "prediction_logits" if "prediction_logits" in found else "logits"
        return found.hidden_states[-1], found[scores]

    def _sentence_vector(self, states_RLH: Tensor, mask_RL: Tensor) -> tuple[Tensor, ...]:
        features: dict[str, Any] = {"token_embeddings": states_RLH, "attention_mask": mask_RL}
        for module in self.pooling:
            features = module(features)
        return (features["sentence_embedding"],) if self.pooling else ()


def open_network(folder: Path) -> ServedNetwork:
    """Return the network in the transformers folder `folder`, on the CPU in fp32, in evaluation mode.

    It has the head of a masked language model or of a detector, or the pooling of a SentenceTransformer. Otherwise, as
    for BART and XLNet, it is the encoder alone. A family without a class in transformers gets that of `hf_equivalent`.

    Raises:
        ModelError: transformers cannot load the folder.
        MissingPackage: transformers, or sentence-transformers for a SentenceTransformer, is not installed.
    """
    config = read_folder_config(folder)
    model, pooling = _load_model_and_pooling(folder, config)
    return ServedNetwork(model, config, pooling).eval()


def _load_model_and_pooling(folder: Path, config: ModelConfig) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    like = hf_equivalent(config)
    if like is not config:
        return _load_as_class(like, config, folder), ()
    if (folder / MODULES_FILE).is_file():
        encoder, *rest = load_model(LocalModel(str(folder), None, folder, ""), EncodingSettings())
        return encoder.model, tuple(rest)
    named = parse_json_object((folder / CONFIG).read_bytes(), str(folder / CONFIG)).get("architectures") or [""]
    if not config.has_decoder and str(named[0]).endswith(_TOKEN_HEAD_SUFFIXES):
        return load_weights(str(named[0]), folder)[0], ()
    encoder = load_weights("AutoModel", folder)[0]
    return (encoder.get_encoder() if config.has_decoder else encoder), ()


def _load_as_class(equivalent_config: ModelConfig, config: ModelConfig, folder: Path) -> nn.Module:
    """Return the encoder in `folder` as transformers' class of `equivalent_config`, an encoder with the same
    weights."""
    transformers = import_optional("transformers", ONNX_PURPOSE, ONNX_EXTRA)
    their, weights = hf_format_of(equivalent_config, "none"), weights_for(config, folder)
    made: nn.Module = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**their.fields))
    names = their.table.their_names(their.layers).items()
    made.load_state_dict({theirs.removeprefix(f"{made.base_model_prefix}."): weights[ours] for ours, theirs in names})
    return made
