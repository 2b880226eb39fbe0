"""Opens a checkpoint's folder with transformers: its tokenizer, and its encoder with a new head.

A folder is data: weights come from safetensors, no code of the folder's is run, and nothing is downloaded.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from data_service.tokenizers.files import check_definition_file, library_errors
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from launcher.errors import EVALUATE_EXTRA, describe_error, import_optional

Head = Literal["SequenceClassification", "TokenClassification", "QuestionAnswering"]  # as in `AutoModelFor<head>`
_IMPORT_PURPOSE = "fine-tuning"  # what needs a package, for the message if it is not installed
_MAX_PLAUSIBLE_TOKENS = 1 << 20  # tokenizers without a maximal length report more tokens than this
# Finds a layer's number in the name of a parameter, for the encoders in transformers.
_LAYER_NUMBER_PATTERN = re.compile(r"(?:^|\.)(?:layers?|albert_layer_groups|attentions|layer_norm[12]|ffns)\.(\d+)\.")
_LOADING_OPTIONS = {"local_files_only": True, "trust_remote_code": False}  # for every `from_pretrained`


def open_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in `folder`. Raises TaskMismatch if transformers has no fast tokenizer for it, or it lacks
    the padding, class or separator token."""
    transformers = import_optional("transformers", _IMPORT_PURPOSE, EVALUATE_EXTRA)
    check_definition_file(folder)
    remedy = "put tokenizer.json and tokenizer_config.json of the model beside its weights"
    with _translate_errors(f"{folder} has no tokenizer that transformers reads", remedy), library_errors(str(folder)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **_LOADING_OPTIONS)
    missing = [role for role in ("pad_token", "cls_token", "sep_token") if getattr(tokenizer, role) is None]
    if missing or not getattr(tokenizer, "is_fast", False):
        what = f"has no {' and no '.join(missing)}" if missing else "cannot say where in a text its tokens are"
        raise TaskMismatch(
            f"the tokenizer in {folder} {what}",
            remedy="put the model's own tokenizer.json beside its weights",
        )
    return tokenizer


def open_model(folder: Path, head: Head, labels: tuple[str, ...]) -> Any:
    """Return `AutoModelFor<head>` with the encoder in `folder` and a new head, in fp32, on the CPU. A head in the
    folder is never used. The new head is drawn with torch's global generator.

    Raises TaskMismatch if transformers cannot load it, it has a decoder, or weights of the encoder are missing.
    """
    config = _load_config(import_optional("transformers", _IMPORT_PURPOSE, EVALUATE_EXTRA), folder, head, labels)
    model, lacking = load_weights(f"AutoModelFor{head}", folder, config=config)
    _check_encoder_weights(model, lacking, folder)
    _initialize_head(model, float(getattr(config, "initializer_range", 0.02)))
    return model


def load_weights(auto_class: str, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the model in `folder` as a class of transformers loads it, in fp32, on the CPU, and the names of
    parameters that the folder lacks or has in another shape. Raises TaskMismatch if transformers cannot load it."""
    transformers = import_optional("transformers", _IMPORT_PURPOSE, EVALUATE_EXTRA)
    remedy = f"give a folder with model.safetensors of a model that {auto_class} can load"
    with _translate_errors(f"transformers cannot load {folder} as {auto_class}", remedy):
        model, report = getattr(transformers, auto_class).from_pretrained(
            str(folder),
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_LOADING_OPTIONS,
            **options,
        )
    return model, [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]


@contextmanager
def _translate_errors(problem: str, remedy: str) -> Iterator[None]:
    """Raise TaskMismatch in place of any error inside the `with` block. `problem`: beginning of its message."""
    try:
        yield
    except Exception as error:
        raise TaskMismatch(f"{problem}: {describe_error(error)}", remedy=remedy) from error


def _load_config(transformers: Any, folder: Path, head: Head, labels: tuple[str, ...]) -> Any:
    remedy = "give a folder that `save_pretrained` or `maskfleet checkpoints export` wrote"
    with _translate_errors(f"{folder} has no configuration that transformers reads", remedy):
        config = transformers.AutoConfig.from_pretrained(str(folder), **_LOADING_OPTIONS)
    if getattr(config, "is_encoder_decoder", False):
        raise TaskMismatch(
            f"{folder} holds an encoder with a decoder ({config.model_type}), but only encoders are fine-tuned here",
            remedy="fine-tune it with transformers, which has classes for such models",
        )
    config.num_labels = 2 if head == "QuestionAnswering" else len(labels) or 1
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    if head == "SequenceClassification":
        config.problem_type = "single_label_classification" if labels else "regression"
    if config.model_type == "xlnet":
        config.bi_data = False  # only pretraining reads half of each batch backwards
    return config


def _check_encoder_weights(model: Any, missing_parameters: list[str], folder: Path) -> None:
    """Raise TaskMismatch if `missing_parameters` names weights of the encoder other than its pooler's."""
    prefix = f"{model.base_model_prefix}."
    gaps = [name for name in missing_parameters if name.startswith(prefix) and ".pooler." not in name]
    if gaps:
        more = f" and {len(gaps) - 3:,} more" if len(gaps) > 3 else ""
        raise TaskMismatch(
            f"the weights in {folder} lack parameters of {type(model.base_model).__name__}, or have them in other "
            f"shapes than its config.json says: {', '.join(gaps[:3])}{more}",
            remedy="use the configuration and the weights of the same encoder",
        )


@torch.no_grad()
def _initialize_head(model: Any, std: float) -> None:
    """Draw new weights for the linear layers of the head: the folder of a fine-tuned model has a head, too."""
    encoder = set(model.base_model.modules())
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in encoder:
            module.weight.normal_(0.0, std)
            if module.bias is not None:
                module.bias.zero_()


def check_tokenizer_fits_model(tokenizer: Any, model: Any, folder: Path, max_length: int | None) -> int:
    """Return the largest number of tokens of an input: `max_length`, or the limit of the model and the tokenizer.

    Raises TaskMismatch if the tokenizer has more ids or token types than the model, or `max_length` exceeds the limit.
    """
    config, sample = model.config, tokenizer("a", "a")
    largest = max(*tokenizer.get_vocab().values(), *sample["input_ids"])
    rows, types = getattr(config, "type_vocab_size", 0) or 0, max(sample.get("token_type_ids", [0]))
    relative = config.model_type == "xlnet"  # XLNet only compares the types of two tokens, so all types are valid
    if largest >= config.vocab_size or (rows and types >= rows and not relative):
        raise TaskMismatch(
            f"the tokenizer in {folder} does not fit the model there: its largest id is {largest:,} (the model has "
            f"{config.vocab_size:,} ids), its largest token type {types} (the model has {rows} types)",
            remedy="use the tokenizer that the model was pretrained with",
        )
    longest = max_row_tokens(tokenizer, model)
    if max_length is not None and longest is not None and max_length > longest:
        raise TaskMismatch(
            f"max_length {max_length:,} is more than the {longest:,} tokens that the model in {folder} takes",
            remedy=f"give a max_length of at most {longest:,}",
        )
    return max_length or longest or 512


def max_row_tokens(tokenizer: Any, model: Any) -> int | None:
    """Return the length of the longest row that the model has positions for and its tokenizer allows; None if neither
    has a limit. Raises TaskMismatch if the tokenizer's limit is not a number above 0."""
    stated = tokenizer.model_max_length
    if not isinstance(stated, int | float) or not stated >= 1:
        raise TaskMismatch(
            f"the tokenizer's model_max_length is {stated!r}, which is not a number of tokens",
            remedy="correct model_max_length in tokenizer_config.json",
        )
    lengths = [int(stated)] if stated < _MAX_PLAUSIBLE_TOKENS else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        lengths.append(positions - _first_position_id(model))
    return min(lengths, default=None)


def _first_position_id(model: nn.Module) -> int:
    """Return the first token's position id: 0, or the padding id + 1 in RoBERTa and models like it."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def layerwise_parameter_groups(model: Any, settings: FinetuneSettings) -> list[dict[str, Any]]:
    """Return AdamW's groups of parameters with a learning rate for each layer.

    A parameter at depth d of L layers has the rate `lr * layer_decay ** (L + 1 - d)`: the head has `lr`, the top layer
    one factor less, the embeddings the lowest rate. (ELECTRA's code has one factor more below the head.) A pooler and a
    final norm count as head, other parameters outside of the encoder's layers as embeddings.
    """
    encoder = {id(parameter): name for name, parameter in model.base_model.named_parameters()}
    numbers = {name: int(found[1]) + 1 for name in encoder.values() if (found := _LAYER_NUMBER_PATTERN.search(name))}
    top, groups = max(numbers.values(), default=0) + 1, dict[tuple[float, bool], list[nn.Parameter]]()
    for name, parameter in model.named_parameters():
        inside = encoder.get(id(parameter))
        above = inside is None or inside.startswith(("pooler.", "final_norm."))
        depth = top if above else numbers.get(inside or "", 0)
        decays = parameter.ndim > 1 and not name.endswith("bias")  # XLNet's biases are 2-D
        rate = settings.lr * settings.layer_decay ** (top - depth)
        groups.setdefault((rate, decays), []).append(parameter)
    return [
        {"params": found, "lr": rate, "weight_decay": settings.weight_decay if decays else 0.0}
        for (rate, decays), found in groups.items()
    ]


@contextmanager
def silence_transformers(purpose: str = _IMPORT_PURPOSE) -> Iterator[None]:
    """Suppress transformers' progress bars, and its warnings about new heads, which are intended. `purpose`: what needs
    transformers, for the message if it is not installed."""
    logging = import_optional("transformers", purpose, EVALUATE_EXTRA).utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
