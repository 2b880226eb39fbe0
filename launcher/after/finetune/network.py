"""The model that is fine-tuned: the class of transformers for the kind of task, or its encoder with our own head. Also
the depth of each parameter.

New parameters are drawn from the seed and their names, so that their values depend neither on other new parameters nor
on any order.
"""

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from data_service.rng import draws64, stream_key
from launcher.after.finetune.heads import HeadConfig, MixedHead
from launcher.after.finetune.inputs import Head
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from launcher.errors import EVALUATE, optional, reason

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
    "encoder.LayerNorm.",  # the norm of DeBERTa's relative embeddings, in v2 and v3
)
_BESIDE_FIRST = ("encoder.conv.",)  # DeBERTa v2's convolution works beside its first layer


@dataclass(frozen=True)
class LayerDepths:
    """Depths of an encoder's parameters: 0 for embeddings, 1 to `layers` for layers, `layers + 1` above them.

    Attributes:
        depths: depth of each parameter, by name.
        layers: number of layers with separate parameters; 1 for ALBERT, whose layers share one set.
        shared: whether several layers use the same parameters.
    """

    depths: dict[str, int]
    layers: int
    shared: bool

    def top(self, count: int) -> set[str]:
        """Return the names of the parameters of the `count` top layers and above them. Raises TaskMismatch if layers
        share parameters, or there are fewer layers."""
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
    """Return the depths of an encoder's parameters. Raises TaskMismatch if its layers are not numbered as in
    transformers' own models."""
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


# Rates of an encoder's dropout, under the names of all families.
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)
_OF_HEADS = (
    "hidden_dropout_prob",
    "dropout",
    "classifier_dropout",
)  # most, XLNet, ModernBERT; EuroBERT has none
_USE = "fine-tuning"


class TaskNetwork(nn.Module):
    """A network that computes logits: a model of transformers with its head, or an encoder with our own `head`.

    Attributes:
        model: the model as transformers made it.
        encoder: the pretrained part of `model`; all of it if `head` is our own.
        head: our own head; None if `model` has its own.
        frozen: whether the encoder keeps its weights and uses no dropout.
        layout: depths of the encoder's parameters, by their names in `encoder`.
    """

    def __init__(self, model: Any, head: MixedHead | None, *, frozen: bool) -> None:
        super().__init__()
        self.model, self.head, self.frozen = model, head, frozen
        self.layout: LayerDepths = layout_of(self.encoder)

    @property
    def encoder(self) -> nn.Module:
        return cast(nn.Module, self.model.base_model)

    @property
    def config(self) -> Any:
        return self.model.config

    def train(self, mode: bool = True) -> "TaskNetwork":
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits in float32: [rows, outputs], or [rows, pieces, outputs] if the head has outputs for each
        piece."""
        if self.head is not None:
            result = self.model(**batch, output_hidden_states=True)
            hidden = (*result.hidden_states[:-1], result.last_hidden_state)
            return cast(Tensor, self.head(hidden, batch["attention_mask"]).float())
        result = self.model(**batch)
        if "start_logits" in result:
            return torch.stack([result.start_logits, result.end_logits], dim=-1).float()
        return cast(Tensor, result.logits.float())


@dataclass(frozen=True)
class HeadSpec:
    """The head that a task needs: its class, its number of outputs, and the names of the classes, if the outputs are
    classes."""

    head: Head
    outputs: int
    labels: tuple[str, ...]


def open_config(folder: Path) -> Any:
    """Return the configuration in `folder`. Raises TaskMismatch if there is none that transformers can read, or it is
    of a model with a decoder."""
    transformers = optional("transformers", _USE, EVALUATE)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any kind: see `reason`
        raise TaskMismatch(
            f"{folder} has no configuration that transformers reads: {reason(error)}",
            remedy="give a folder that `save_pretrained` or `maskfleet checkpoints export` wrote",
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise TaskMismatch(
            f"{folder} holds an encoder with a decoder ({config.model_type}), and tasks are for encoders alone",
            remedy="fine-tune it with transformers, which has classes of its own for such models",
        )
    return config


def open_network(
    folder: Path, config: Any, wanted: HeadSpec, settings: FinetuneSettings, seed: int
) -> TaskNetwork:
    """Return the encoder in `folder` with a new head, in fp32, on the CPU.

    New parameters are drawn from (seed, name of the parameter): those of the head, of a pooler that the checkpoint
    lacks, and of `settings.reinit_layers`. A head in the folder is never used, whatever task it was for.

    Raises TaskMismatch if the folder lacks parameters of the encoder, or the settings do not fit the model.
    """
    _configure(config, wanted, settings)
    own = settings.pooling != "class" or settings.layers != "last"
    head = _own_head(config, wanted, settings) if own else None
    model, missing = _load(folder, config, "" if own else f"For{wanted.head}")
    network = TaskNetwork(model, head, frozen=settings.freeze)
    _check_gaps(network, missing, folder)
    fresh = _fresh(network, missing, settings.reinit_layers)
    initialise(network, fresh, float(getattr(config, "initializer_range", 0.02)), seed)
    _set_task_dropout(network, settings.task_dropout)
    if settings.freeze:
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in fresh)
    return network


def _configure(config: Any, wanted: HeadSpec, settings: FinetuneSettings) -> None:
    config.num_labels = wanted.outputs
    if wanted.labels:
        config.id2label = dict(enumerate(wanted.labels))
        config.label2id = {label: index for index, label in enumerate(wanted.labels)}
    if wanted.head == "SequenceClassification":
        config.problem_type = "single_label_classification" if wanted.labels else "regression"
    if config.model_type == "xlnet":
        config.bi_data = False  # half of each batch backwards is for pretraining
    if settings.dropout is not None:
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, settings.dropout)
    if settings.task_dropout is not None and hasattr(config, "summary_last_dropout"):
        config.summary_last_dropout = settings.task_dropout


def _own_head(config: Any, wanted: HeadSpec, settings: FinetuneSettings) -> MixedHead:
    """Return our own head for the task. Raises TaskMismatch if the kind of task needs a pooling and the settings have
    none, or the other way round, or the encoder has too few layers."""
    texts = wanted.head == "SequenceClassification"
    if texts == (settings.pooling == "class"):
        raise TaskMismatch(
            f"pooling {settings.pooling} with layers {settings.layers}: "
            + ("a head over mixed layers needs a pooling" if texts else "labels of pieces have no pooling"),
            remedy="set pooling to cls, mean or max" if texts else "leave out pooling",
        )
    dropout = next((getattr(config, name) for name in _OF_HEADS if hasattr(config, name)), 0.0)
    try:
        described = HeadConfig(
            hidden=config.hidden_size,
            states=config.num_hidden_layers + 1,
            outputs=wanted.outputs,
            layers=settings.layers,
            pooling=None if settings.pooling == "class" else settings.pooling,
            left=config.model_type == "xlnet",
            dropout=dropout if settings.task_dropout is None else settings.task_dropout,
        )
    except ValidationError as error:
        raise TaskMismatch(
            "; ".join(detail["msg"] for detail in error.errors()), remedy="choose other layers"
        ) from error
    return MixedHead(described)


def _load(folder: Path, config: Any, head: str) -> tuple[Any, list[str]]:
    """Return the model, and the names of its encoder's parameters that the folder lacks or has in another shape."""
    transformers = optional("transformers", _USE, EVALUATE)
    loader = getattr(transformers, f"AutoModel{head}")
    with quiet(transformers):
        try:
            model, report = loader.from_pretrained(
                str(folder),
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # of any kind: see `reason`
            raise TaskMismatch(
                f"transformers cannot load {folder} as AutoModel{head}: {reason(error)}",
                remedy="give a folder with model.safetensors of an encoder that transformers has for such tasks",
            ) from error
    if not head and getattr(model, "pooler", None) is not None:
        model.pooler = None  # our own head reads hidden states
    lacking = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return model, sorted(name.removeprefix(prefix) for name in lacking if name.startswith(prefix))


def _check_gaps(network: TaskNetwork, missing: list[str], folder: Path) -> None:
    gaps = [name for name in missing if name in network.layout.depths and not name.startswith("pooler.")]
    if gaps:
        more = f" and {len(gaps) - 3:,} more" if len(gaps) > 3 else ""
        raise TaskMismatch(
            f"the weights in {folder} lack parameters of {type(network.encoder).__name__}, or have them in other "
            f"shapes than its config.json says: {', '.join(gaps[:3])}{more}",
            remedy="use the configuration and the weights of the same encoder",
        )


def _fresh(network: TaskNetwork, missing: list[str], reinit_layers: int) -> set[str]:
    """Return the names of the parameters that are drawn anew."""
    pretrained = {id(parameter) for parameter in network.encoder.parameters()}
    heads = {name for name, parameter in network.named_parameters() if id(parameter) not in pretrained}
    inside = {*missing, *network.layout.top(reinit_layers)}
    encoder = {id(parameter): name for name, parameter in network.encoder.named_parameters()}
    return heads | {
        name for name, parameter in network.named_parameters() if encoder.get(id(parameter)) in inside
    }


def _set_task_dropout(network: TaskNetwork, rate: float | None) -> None:
    """Set the rate of the dropout before the output. Raises TaskMismatch if the class of transformers has none."""
    inside = set(network.encoder.modules())
    found = [
        module for module in network.modules() if isinstance(module, nn.Dropout) and module not in inside
    ]
    if rate is None or (not found and not rate):
        return
    if not found:
        raise TaskMismatch(
            f"task_dropout: {type(network.model).__name__} has no dropout before its output",
            remedy="leave out task_dropout, or set `dropout`",
        )
    found[-1].p = rate


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress transformers' progress bars, and its warnings about new heads, which are intended."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_SIGNED = 2**63


def seed_of(*parts: int | str) -> int:
    """Return a seed for torch's generators, derived from `parts`, which name its use."""
    return int(draws64(stream_key("fine-tuning", *parts), 0, 1)[0]) % _SIGNED


@torch.no_grad()
def initialise(model: nn.Module, names: Set[str], spread: float, seed: int) -> None:
    """Draw the named parameters of `model` anew: weights from N(0, `spread`), norms 1, biases 0, mixture weights equal.

    The values follow transformers' rules, but each parameter has an independent random stream.
    """
    for path, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if name not in names:
                continue
            if norm:
                parameter.fill_(1.0 if own == "weight" else 0.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            elif parameter.ndim == 0:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(seed_of(seed, "initial", name))
                parameter.normal_(0.0, spread, generator=generator)
