"""What we rely upon in transformers, by name: classes, their parameters, and the fields of their configurations. A
release that renames one fails here, with that name."""

import dataclasses
from typing import get_args

import pytest
import transformers

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import FAMILIES, TYPES_WITHOUT_HF_CLASS, HfFormat, ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.tiny import tiny

UNDECLARED = {
    "DeBERTa": {"mask_decoder"},
    "DeBERTa v2": {
        *(
            "conv_act",
            "conv_kernel_size",
            "mask_decoder",
            "norm_rel_ebd",
            "position_buckets",
            "share_att_key",
        ),
    },
    "ModernBERT": {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"},
    "EuroBERT": {"hidden_dropout", "rope_theta"},
    "XLM": {"id2lang", "lang2id"},
    "XLNet": {"attention_dropout", "longest_row"},
}
"""Fields that we write, and that a configuration takes without declaring them: some are read, others are ours."""


def small(family: type[ModelConfig]) -> ModelConfig:
    """Without DeBERTa's enhanced mask decoder, which transformers lacks."""
    config = tiny(load(family.recipe)).model.with_tokenizer(60, 0)
    return config.model_copy(update={"mask_decoder": "plain"} if hasattr(config, "mask_decoder") else {})


def written(config: ModelConfig, heads: Heads) -> HfFormat | None:
    """How it is exported; None if transformers has no class that reads these heads."""
    try:
        its = hf_format_of(config, heads)
    except ModelError:
        return None
    ignored = heads == "rtd" and config.family != "electra"
    return None if its.architecture is None or ignored else its


CASES = {
    f"{family.name}-{heads}": (family.name, its)
    for family in FAMILIES
    for heads in get_args(Heads)
    if (its := written(small(family), heads)) is not None
}


def test_only_the_families_without_a_class_are_left_out() -> None:
    left_out = {family.name for family in FAMILIES} - {name for name, _ in CASES.values()}
    assert len(left_out) == len(TYPES_WITHOUT_HF_CLASS)


@pytest.mark.parametrize("case", CASES)
def test_a_class_has_our_parameters_and_its_configuration_our_fields(case: str) -> None:
    name, its = CASES[case]
    config = transformers.AutoConfig.for_model(**its.fields)
    known = {field.name for field in dataclasses.fields(config)} | set(type(config).attribute_map)
    assert its.fields.keys() - known - {"architectures", "model_type"} == UNDECLARED.get(name, set())
    state = getattr(transformers, str(its.architecture))(config).state_dict()
    assert its.table.match(state, its.layers, case).keys() == its.table.their_names(its.layers).keys()
