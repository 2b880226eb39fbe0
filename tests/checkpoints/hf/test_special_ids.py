"""Exports carry the tokenizer's ids of special tokens, whatever ids the published model of the family has."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig, AutoTokenizer

from checkpoints.hf.folder import CONFIG
from checkpoints.hf.load import read_folder_config
from data_service.tokenizers.specials import Style
from data_service.tokenizers.tokenizer import Kind
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.families.roberta import RobertaConfig
from launcher.errors import RunError
from launcher.runtime.recipe.continued import continued_recipe
from launcher.runtime.recipe.objective import DenoiseTerm, RecipeObjective
from tests.checkpoints.hf.test_tied import CASES
from tests.support.models.exports import FAMILIES, SHAPE, Family, export

ROLES = ("cls", "sep", "bos", "eos", "pad", "mask")
EVERY = {
    **FAMILIES,
    "bart": Family(BartConfig(**SHAPE), RecipeObjective(denoise=DenoiseTerm()), "byte_bpe", "roberta"),
}
STYLES: tuple[Style, ...] = get_args(Style)
KINDS: tuple[Kind, ...] = ("wordpiece", "byte_bpe", "unigram", "bpe")


@pytest.mark.parametrize("name", EVERY)
def test_a_config_has_the_ids_of_its_tokenizer(tmp_path: Path, name: str) -> None:
    draws = random.Random(name)
    family = EVERY[name]
    drawn = replace(family, kind=draws.choice(KINDS), style=draws.choice(STYLES))
    for number, its in enumerate((family, drawn)):
        export(its, tmp_path / str(number))
        for part in its.folders:
            folder = tmp_path / str(number) / part
            config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
            for role in ROLES:
                expected = getattr(tokenizer, f"{role}_token_id")
                assert expected is not None
                assert getattr(config, f"{role}_token_id") == expected, (its.kind, its.style, role)


def described(folder: Path, config: ModelConfig, heads: Heads, **changes: Any) -> dict[str, Any]:
    fields = hf_format_of(config, heads).fields | changes
    (folder / CONFIG).write_text(json.dumps(fields))
    return fields


@pytest.mark.parametrize(("config", "heads"), CASES.values(), ids=CASES)
def test_a_model_without_padding_id_is_read_unless_positions_begin_after_it(
    tmp_path: Path, config: ModelConfig, heads: Heads
) -> None:
    if not config.offsets_positions_by_padding:
        described(tmp_path, config, heads, pad_token_id=None)
        assert read_folder_config(tmp_path).model_copy(update={"pad_id": config.pad_id}) == config
        return
    described(tmp_path, config, heads, pad_token_id=None)
    with pytest.raises(ModelError, match=r"\bpad_token_id\b.*\bnull\b") as error:
        read_folder_config(tmp_path)
    assert error.value.remedy is not None
    assert "pad_token_id" in error.value.remedy
    described(tmp_path, config, heads, pad_token_id=1)
    assert read_folder_config(tmp_path) == config


@pytest.mark.parametrize("config", [BertConfig(**SHAPE, vocab=99), RobertaConfig(**SHAPE, vocab=99)])
@pytest.mark.parametrize(
    ("field", "value"), [("intermediate_size", -3), ("num_hidden_layers", 0), ("hidden_dropout_prob", "a")]
)
def test_a_field_of_another_kind_is_named_where_the_user_put_it(
    tmp_path: Path, config: ModelConfig, field: str, value: object
) -> None:
    described(tmp_path, config, "mlm", **{field: value})
    with pytest.raises((ModelError, RunError)) as error:
        continued_recipe(str(tmp_path))
    text = str(error.value)
    assert str(tmp_path / CONFIG) in text
    assert repr(value) in text
    assert "pydantic" not in text
