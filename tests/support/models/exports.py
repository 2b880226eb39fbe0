"""A small model and a fitting tokenizer of every family, exported as `maskfleet checkpoints export` does."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from data_service.store.open import open_store
from data_service.tokenizers.specials import Style
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import DenoiseTerm, MlmTerm, PlmTerm, RecipeObjective, exported_heads
from tests.support.data.made_up import WORDS
from tests.support.models.written import export_model, export_pair

LENGTH = 24
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 48, "max_length": LENGTH}
MLM = MlmTerm()
DISENTANGLED = ReplacedTokenConfig(embeddings="gradient_disentangled")


@dataclass(frozen=True)
class Family:
    """A model, what it is trained by, the kind of tokenizer it has, and the folders of its export."""

    config: ModelConfig
    objective: RecipeObjective
    kind: Kind
    style: Style
    folders: tuple[str, ...] = (".",)


_PAIR = ("generator", "discriminator")
FAMILIES: Mapping[str, Family] = {
    "bert": Family(BertConfig(**SHAPE), RecipeObjective(mlm=MLM, nsp=NspConfig()), "wordpiece", "bert"),
    "roberta": Family(RobertaConfig(**SHAPE), RecipeObjective(mlm=MLM), "byte_bpe", "roberta"),
    "albert": Family(
        AlbertConfig(**SHAPE, embedding=16), RecipeObjective(mlm=MLM, sop=SopConfig()), "unigram", "albert"
    ),
    "spanbert": Family(
        BertConfig(**SHAPE),
        RecipeObjective(mlm=MLM.model_copy(update={"unit": "span"}), sbo=SboConfig()),
        "wordpiece",
        "bert",
    ),
    "xlnet": Family(XlnetConfig(**SHAPE, reuse=0, memory=0), RecipeObjective(plm=PlmTerm()), "unigram", "xlnet"),
    "electra": Family(
        ElectraConfig(**SHAPE, embedding=16, generator_divisor=2),
        RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()),
        "wordpiece",
        "bert",
        _PAIR,
    ),
    "deberta": Family(DebertaConfig(**SHAPE), RecipeObjective(mlm=MLM), "byte_bpe", "roberta"),
    "deberta-v2": Family(DebertaV2Config(**SHAPE, buckets=8), RecipeObjective(mlm=MLM), "unigram", "deberta"),
    "modernbert": Family(ModernBertConfig(**SHAPE, local_attention=8), RecipeObjective(mlm=MLM), "byte_bpe", "bert"),
    "eurobert": Family(EuroBertConfig(**SHAPE, key_value_heads=2), RecipeObjective(mlm=MLM), "byte_bpe", "bert"),
    "xlm": Family(
        XlmConfig(**SHAPE | {"feed_forward": 128}, languages=("en", "fr")),
        RecipeObjective(mlm=MLM),
        "wordpiece",
        "bert",
    ),
    "deberta-v3": Family(
        DebertaV2Config(**SHAPE, buckets=8),
        RecipeObjective(mlm=MLM, rtd=DISENTANGLED),
        "unigram",
        "deberta",
        _PAIR,
    ),
}

SERVED: Mapping[str, Family] = {
    **FAMILIES,
    "distilbert": Family(BertConfig(**SHAPE, token_types=0), RecipeObjective(mlm=MLM), "wordpiece", "bert"),
    "neobert": Family(NeoBertConfig(**SHAPE), RecipeObjective(mlm=MLM), "wordpiece", "bert"),
    "bart": Family(BartConfig(**SHAPE), RecipeObjective(denoise=DenoiseTerm()), "byte_bpe", "roberta"),
}
"""What an ONNX graph is made of: these, and what is exported otherwise."""


@cache
def fitting_tokenizer(kind: Kind, style: Style) -> Tokenizer:
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=12)) + "." for _ in range(200)]
    size = {"byte_bpe": 300, "wordpiece": 80, "unigram": 300, "bpe": 330}[kind]
    return train_tokenizer(kind, texts, size, TokenizerOptions(specials=style))


def export(family: Family, folder: Path) -> None:
    """A freshly initialised model, exported to `folder`."""
    tokenizer = fitting_tokenizer(family.kind, family.style)
    config = family.config.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    torch.manual_seed(0)
    model = objective_module(config, family.objective)
    initialise(model, 0.1, "normal")
    read = {name: parameter.detach() for name, parameter in model.named_parameters()}.__getitem__
    files, out = tokenizer.save_files(), open_store(folder)
    if family.objective.rtd is not None:
        export_pair(read, config, files, out, family.objective.rtd.embeddings)
    else:
        export_model(read, config, files, out, exported_heads(config, family.objective))
