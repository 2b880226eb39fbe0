"""Configurations refuse what cannot be built, and take their vocabulary from the tokenizer."""

from typing import Any

import pytest
from pydantic import ValidationError

from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.roberta import RobertaConfig

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "feed_forward": 128}


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValidationError, match="multiple of heads"):
        RobertaConfig(**SHAPE | {"heads": 5})


def test_more_groups_than_layers_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"groups \(3\)"):
        AlbertConfig(**SHAPE, groups=3)


def test_takes_its_vocabulary_from_the_tokenizer() -> None:
    config = RobertaConfig(**SHAPE).with_tokenizer(1000, pad_id=3)
    assert (config.vocabulary_size, config.pad_id, config.first_position) == (1000, 3, 4)


def test_keeps_a_larger_vocabulary_and_refuses_a_smaller() -> None:
    config = RobertaConfig(**SHAPE, vocab=1024)
    assert config.with_tokenizer(1000, 1).vocabulary_size == 1024
    with pytest.raises(ModelError, match=r"\b1024\b.*\b1025 ids\b"):
        config.with_tokenizer(1025, 1)
