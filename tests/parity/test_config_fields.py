"""Fields of a config.json that decide how the weights are used: what a file says and we lack is refused, with a remedy
that can be followed, and what an export leaves out is transformers' default."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from encoder_core.errors import ModelError
from encoder_core.families import albert, bart, bert, deberta, electra, eurobert, modernbert, roberta, xlm, xlnet
from encoder_core.families.catalogue import TYPES_WITHOUT_HF_CLASS, read_config
from encoder_core.families.config_json import ONLY_ENCODERS, ConfigJson
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig

MODULES = (albert, bart, bert, electra, eurobert, modernbert, roberta, xlm, xlnet)
FORMS: dict[str, ConfigJson] = {
    form.model_type: form
    for form in (
        *(module.CONFIG_JSON for module in MODULES),
        bert.DISTILBERT_CONFIG_JSON,
        *deberta.CONFIG_JSON_BY_FAMILY.values(),
    )
}
PUBLISHED: dict[str, dict[str, Any]] = {  # fields without which transformers' defaults are no published model
    "bart": {"encoder_layers": 2, "decoder_layers": 2},
    **dict.fromkeys(
        ("deberta", "deberta-v2"),
        {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
        | {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ),
}
FIXED = {
    (kind, name): fixed for kind, form in FORMS.items() for name, fixed in {**form.constants, **form.unwritten}.items()
}


def fields_of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, "tie_word_embeddings": True} | PUBLISHED.get(kind, {}) | fields


@pytest.mark.parametrize(("kind", "name"), FIXED)
def test_a_field_of_one_value_is_refused_with_another_and_read_with_its_own(kind: str, name: str) -> None:
    value, remedy = FIXED[kind, name]
    other = {bool: lambda: not value, int: lambda: value + 7, str: lambda: f"no {value}"}[type(value)]()
    with pytest.raises(ModelError, match=f"^config.json: {name} is ") as error:
        read_config(fields_of(kind, **{name: other}))
    assert error.value.remedy == remedy
    read_config(fields_of(kind, **{name: value}))


@pytest.mark.parametrize("kind", FORMS)
def test_a_field_that_an_export_leaves_out_has_transformers_default(kind: str) -> None:
    default = AutoConfig.for_model(kind)
    for name, (value, _) in FORMS[kind].unwritten.items():
        assert getattr(default, name, value) == value


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((kind, name, True) for kind in ("bert", "roberta", "albert", "electra", "deberta", "deberta-v2")
          for name in ("is_decoder", "add_cross_attention")),
        ("xlm", "is_encoder", False),
    ],
)  # fmt: skip
def test_a_decoder_is_told_that_an_encoder_is_needed(kind: str, name: str, value: bool) -> None:
    with pytest.raises(ModelError, match=name) as error:
        read_config(fields_of(kind, **{name: value}))
    assert error.value.remedy == ONLY_ENCODERS


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert", "electra"])
@pytest.mark.parametrize("position", ["relative_key", "relative_key_query"])
def test_relative_positions_of_older_files_are_refused_by_their_field(kind: str, position: str) -> None:
    """transformers 4 has them in all of these classes."""
    with pytest.raises(ModelError, match="position_embedding_type"):
        read_config(fields_of(kind, position_embedding_type=position))


ROPE_TYPES = st.sampled_from([None, "default", "linear", "dynamic", "yarn"])
rope_parameters = st.fixed_dictionaries(
    {},
    optional={"rope_type": ROPE_TYPES, "type": ROPE_TYPES, "rope_theta": st.sampled_from([500.0, 10_000.0, 160_000.0])},
).map(lambda drawn: {name: value for name, value in drawn.items() if value is not None})


@given(
    kind=st.sampled_from(["llama", "eurobert", "modernbert"]),
    name=st.sampled_from(["rope_scaling", "rope_parameters"]),
    parameters=rope_parameters,
    base=st.sampled_from([20_000.0, 160_000.0]),
)
def test_rotary_positions_are_read_as_transformers_reads_them(
    kind: str, name: str, parameters: dict[str, Any], base: float
) -> None:
    """Under either name, with the type under either key: scaled ones are refused, and only these."""
    layered = kind == "modernbert"
    both = {"sliding_attention": dict(parameters), "full_attention": dict(parameters)}
    bases = {"global_rope_theta": base, "local_rope_theta": 2 * base} if layered else {"rope_theta": base}
    stated = fields_of(kind, **bases, **{name: both if layered and name == "rope_parameters" else parameters})
    scaled = parameters.get("rope_type", parameters.get("type", "default")) != "default"
    if scaled:
        with pytest.raises(ModelError, match=name):
            read_config(stated)
        return
    theirs = AutoConfig.for_model(**stated).rope_parameters
    found = read_config(stated)
    if layered:
        assert isinstance(found, ModernBertConfig)
        assert found.global_rope_base == theirs["full_attention"]["rope_theta"]
        assert found.local_rope_base == theirs["sliding_attention"]["rope_theta"]
    else:
        assert isinstance(found, EuroBertConfig)
        assert found.rotary_base == theirs["rope_theta"]


@given(buckets=st.integers(-3, 0), kernel=st.integers(1, 9).filter(lambda kernel: kernel != 3))
def test_a_deberta_v2_without_buckets_or_with_another_convolution_is_refused(buckets: int, kernel: int) -> None:
    """transformers has both, published weights have neither: an error names their field, not ours."""
    for name, value in (("position_buckets", buckets), ("conv_kernel_size", kernel)):
        changed = {"conv_act": "gelu", name: value}
        with pytest.raises(ModelError, match=name):
            read_config(fields_of("deberta-v2", **changed))
    whole = read_config(fields_of("deberta-v2", conv_act="gelu", conv_kernel_size=3))
    assert isinstance(whole, DebertaV2Config)
    assert (whole.buckets, whole.convolution) == (256, 3)


def test_no_remedy_asks_for_a_file_that_no_class_of_transformers_writes() -> None:
    for kind in TYPES_WITHOUT_HF_CLASS:
        sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "max_length"), 8)
        fields = {"model_type": kind, "vocab_size": 99, "norm_eps": 1e-5, "intermediate_size": "wide"} | sizes
        with pytest.raises(ModelError) as error:
            read_config(fields)
        assert "transformers" not in str(error.value.remedy)
