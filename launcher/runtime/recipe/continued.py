"""Writes the recipe that continues training a model in the transformers format.

The model's family, sizes and tokenizer come from its folder. Learning rate, steps and batch are settings for continued
training. The rest (what is masked, how the run is operated) comes from the bundled recipe of the family.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from checkpoints.hf.folder import (
    CONFIG,
    GENERATOR_CONFIG,
    PAIR_FOLDERS,
    holds_generator,
    local_configs,
    replace_path_in_errors,
)
from checkpoints.hf.load import config_from_fields, generator_fields, is_discriminator, read_folder_config
from data_service.samples.pairs import Translations
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import holds_tokenizer
from encoder_core.families.catalogue import ModelConfig, embedded_languages
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.optim.settings import AdamWConfig, Decayed
from launcher.errors import RunError
from launcher.runtime.recipe.document import RecipeDocument
from launcher.runtime.recipe.load import load, recipe_from_document
from launcher.runtime.recipe.schema import PLACEHOLDER, Recipe

_PAIR_TASK_CLASSES = ("BertForPreTraining", "AlbertForPreTraining")  # classes with a head of a sentence-pair task
STEPS, ROWS, MICROBATCH, LONGEST = 12_500, 256, 16, 512  # steps; rows of batch and microbatch; longest row in tokens
WARMUP_STEPS = STEPS // 10
LR = 1e-4  # peak learning rate
DATA_MEMORY = "1GiB"  # `data_service.memory` of the recipe
TOKENIZER_PLACEHOLDER = f"{PLACEHOLDER}tokenizers/the-models-own"

_KEY_COMMENTS = {  # comments above the keys of the written recipe
    "start": "the weights; heads that the folder lacks begin fresh, and the run's `start` event names them",
    "corpus": "yours, built with the tokenizer below: maskfleet init FILE RUN --corpus URI",
    "tokenizer": "the model's own; for another one, rows follow their pieces (maskfleet tokenizer extend)",
    "model": "as the folder's config.json says; dropout alone may be changed",
    "phases": f"Gururangan et al. 2020 adapted models in {STEPS:,} steps of 2,048 rows; little text needs fewer steps",
    "optimizer": "a sixth of RoBERTa's rate, so that what the model knows is not erased. With bias correction: Adam's "
    "moments begin at zero,\n# and without it the first steps are up to six times as large as the rate says",
    "schedule": "the rate rises for a tenth of the steps, while Adam's moments and a fresh head are still unreliable",
    "microbatch": "rows; more are faster on a large GPU",
    "data_service": "memory for data that wait to be trained on: what a small machine has left beside training",
}
_PAIR_KEY_COMMENTS = {  # instead of those above, if the recipe trains a generator and a discriminator
    "start": "the weights. If the discriminator is alone, the generator begins with its embeddings and some of its\n"
    "# layers; heads that the folder lacks begin fresh. The run's `start` event names what was read, made and left",
    "objective": "the names of the folder's weights are those of a discriminator: it is trained further as one",
}
_SINGLE_NETWORK_COMMENT = (  # above `objective`; {} is the name of the family's recipe for a pair
    "the folder has no discriminator's head, so one network is trained. If the model is a discriminator without its\n"
    "# head, take `objective` from {}"
)


@dataclass(frozen=True)
class _FoundModel:
    """The model in the folder.

    Attributes:
        config: configuration of the network; of a pair, the discriminator's.
        pair: whether the folder has a generator and a discriminator, or a discriminator from which a generator is made.
        pair_head: whether the model has a head of a sentence-pair task, which is trained further.
    """

    config: ModelConfig
    pair: bool
    pair_head: bool


def continued_recipe(folder: str) -> Recipe:
    """Return the recipe that continues the model, or the pair of networks, in `folder` (a local folder or s3://).

    A discriminator, such as the published DeBERTa v3, is trained with a generator: the folder's, or one made from it.

    Raises:
        ModelError: there is no model, one of an unsupported family, or damaged weights.
        RunError: the folder has one network of a pair without the other, or two that are not a pair.
        StoreError: the folder cannot be read.
    """
    store = open_store(folder)
    found = _find_model(store, folder)
    base = load(_base_recipe(found.config, pair=found.pair))
    data = base.to_data() | {
        "name": _recipe_name(folder),
        "start": folder,
        "corpus": {
            "sources": _placeholder_sources(found.config),
            "heldout": {"fraction": base.corpus.heldout.fraction},
        },
        "mixing": base.mixing.model_copy(update={"translations": None}).model_dump(mode="json"),
        "tokenizer": {"uri": _tokenizer_uri(store, folder)},
        "model": found.config.model_dump(mode="json", exclude={"pad_id"}),
        "phases": [{"steps": STEPS, "length": _row_length(found.config), "batch": {"sequences": ROWS}}],
        "optimizer": {"adamw": _adamw_settings(found.config)},
        "schedule": {"warmup": WARMUP_STEPS, "decay": "linear"},
        "microbatch": MICROBATCH,
        "data_service": {"workers": "auto", "memory": DATA_MEMORY},
    }
    return recipe_from_document(RecipeDocument(data | _task_values(found, base), f"the recipe for {folder}", {}))


def _placeholder_sources(config: ModelConfig) -> dict[str, object]:
    languages = embedded_languages(config)
    if not languages:
        return {"text": {"uri": f"{PLACEHOLDER}corpora/text", "weight": "auto"}}
    return {name: {"uri": f"{PLACEHOLDER}corpora/{name}", "weight": "auto", "languages": [name]} for name in languages}


def commented_yaml(recipe: Recipe) -> str:
    """Return `recipe` as complete YAML, with the reason of each choice above it."""
    name, reasons = _base_recipe(recipe.model, pair=recipe.objective.rtd is not None), _key_comments(recipe)
    parts = [f"# Continues a model. `maskfleet recipe show {name} --raw` explains every key.\n"]
    for key, value in recipe.to_data().items():
        if key in reasons:
            parts.append(f"\n# {reasons[key]}.\n")
        parts.append(_key_to_yaml(key, value))
    return "".join(parts)


def _key_comments(recipe: Recipe) -> dict[str, str]:
    if recipe.objective.rtd is not None:
        return _KEY_COMMENTS | _PAIR_KEY_COMMENTS
    if recipe.model.pair_recipe is not None and not recipe.model.has_convolution:
        return _KEY_COMMENTS | {"objective": _SINGLE_NETWORK_COMMENT.format(recipe.model.pair_recipe)}
    return _KEY_COMMENTS


def _key_to_yaml(key: str, value: object) -> str:
    """Return the YAML of one key, with innermost mappings on one line, as in the bundled recipes."""
    flow = None if isinstance(value, dict | list) else False
    return yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=110, default_flow_style=flow)


def _base_recipe(config: ModelConfig, *, pair: bool) -> str:
    """Return the name of a family's bundled recipe. `pair`: whether to prefer that of generator and discriminator."""
    return (config.pair_recipe if pair else None) or config.recipe


def _find_model(store: Store, folder: str) -> _FoundModel:
    with local_configs(store) as configs, replace_path_in_errors(configs, folder):
        if (configs / PAIR_FOLDERS[1] / CONFIG).is_file():
            generator, discriminator = (read_folder_config(configs / part) for part in PAIR_FOLDERS)
            return _FoundModel(_as_pair(generator, discriminator), pair=True, pair_head=False)
        config = read_folder_config(configs)
        architectures = _architectures(configs)
    if config.main_heads == "rtd":
        raise RunError(
            f"{folder} holds only one of the two networks of {config.name}, which are trained together",
            remedy=f"put the generator into {PAIR_FOLDERS[0]}/, the discriminator into {PAIR_FOLDERS[1]}/ of one "
            "folder",
        )
    if config.has_generator and holds_generator(store):
        generator = config_from_fields(generator_fields(store), f"{folder.rstrip('/')}/{GENERATOR_CONFIG}")
        return _FoundModel(_as_pair(generator, config), pair=True, pair_head=False)
    alone = config.has_generator and is_discriminator(store, config)
    return _FoundModel(config, pair=alone, pair_head=any(name in _PAIR_TASK_CLASSES for name in architectures))


def _as_pair(generator: ModelConfig, discriminator: ModelConfig) -> ModelConfig:
    """Return `discriminator` with the size of its generator. Raises RunError or ModelError if they are not a pair."""
    if generator.family != discriminator.family:
        raise RunError(
            f"the generator is of family {generator.family}, but the discriminator of {discriminator.family}",
            remedy="give two networks of one family that were trained together",
        )
    return discriminator.paired_with(generator)


def _architectures(configs: Path) -> list[str]:
    named = json.loads((configs / CONFIG).read_bytes()).get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _task_values(found: _FoundModel, base: Recipe) -> dict[str, Any]:
    """Return the values of `objective` and `input` that differ from the family's bundled recipe.

    A sentence-pair task is left out if the folder has no head for it: pairs of segments would only make rows unlike
    those of the model's training. XLNet's targets and reuse follow the length of the model's rows. XLM continues with
    text in each of its languages; the user may add translations.
    """
    objective, config = base.objective, found.config
    if objective.plm is not None:
        length = _row_length(config)
        smaller = {"predict": max(1, length // 6), "permutation": length // 2}
        plm = objective.plm.model_copy(update=smaller).model_dump(mode="json")
        reuse = config.recurrence.reuse if config.recurrence else length // 2
        return {"objective": {"plm": plm}, "input": base.input.model_dump(mode="json") | {"reuse": reuse}}
    if found.pair and objective.rtd is None and objective.mlm is not None:
        # The discriminator's embeddings are the generator's plus a difference. If the folder's networks share their
        # embeddings, the difference begins at zero, so this setting fits both kinds of pairs.
        masks = objective.mlm.model_copy(update={"copies": "dynamic"}).model_dump(mode="json")
        rtd = ReplacedTokenConfig(embeddings="gradient_disentangled").model_dump(mode="json")
        return {"objective": {"mlm": masks, "rtd": rtd}, "input": {"packing": "full_sentences"}}
    if found.pair_head or objective.mlm is None or (objective.nsp is None and objective.sop is None):
        return {"input": {"packing": base.input.text}} if isinstance(base.input, Translations) else {}
    mlm = objective.mlm.model_copy(update={"copies": "dynamic"}).model_dump(mode="json")
    return {"objective": {"mlm": mlm}, "input": {"packing": "full_sentences"}}


def _adamw_settings(config: ModelConfig) -> dict[str, Any]:
    decayed: Decayed = "xlnet" if config.permutes else "no_bias_norm"
    settings = AdamWConfig(lr=LR, betas=(0.9, 0.98), clip=1.0, bias_correction=True, decayed=decayed)
    return settings.model_dump(mode="json")


def _row_length(config: ModelConfig) -> int:
    return min(config.max_length, LONGEST)


def _recipe_name(folder: str) -> str:
    """Return the recipe's name: `continued-` and the folder's name, without characters that are not allowed."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.rstrip("/").rpartition("/")[2]).strip("-.")
    return f"continued-{name or 'model'}"


def _tokenizer_uri(store: Store, folder: str) -> str:
    """Return the folder or the discriminator's folder, whichever holds a tokenizer; a placeholder if neither does."""
    for part in (".", PAIR_FOLDERS[1]):
        if holds_tokenizer(store if part == "." else store.with_prefix(part)):
            return folder if part == "." else f"{folder.rstrip('/')}/{part}"
    return TOKENIZER_PLACEHOLDER
