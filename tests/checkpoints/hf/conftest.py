"""A small RoBERTa of ours, its parameters by name, and a tokenizer for it."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.network import masked_language_model
from tests.support.models.parity import random_weights

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, bytes]:
    """A byte-level BPE without merges: 5 special tokens and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIALS)
    configured = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 40,
        "bos_token": "<s>",
        "cls_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(configured).encode(),
    }


@pytest.fixture
def config() -> RobertaConfig:
    return RobertaConfig(layers=2, hidden=32, heads=4, feed_forward=48, max_length=40, vocab=261)


@pytest.fixture
def model(config: RobertaConfig) -> MultitaskModel:
    return random_weights(masked_language_model(config)).eval()


@pytest.fixture
def parameters(model: MultitaskModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(autouse=True)
def _single_seed() -> None:
    torch.manual_seed(0)
