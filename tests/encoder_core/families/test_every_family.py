"""What every family of the list promises: nobody who adds one has to name it here."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from checkpoints.hf.load import load_pretrained
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import FAMILIES, ModelConfig, hf_format_of, read_config
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.network import build_network
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import TermConfig
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.tiny import tiny
from tests.support.models.parity import make_batch
from tests.support.models.written import export_model

VOCABULARY = 60
SMALL: dict[str, ModelConfig] = {
    family.name: tiny(load(family.recipe)).model.with_tokenizer(VOCABULARY, 0) for family in FAMILIES
}
OBJECTIVES: dict[str, dict[str, TermConfig]] = {
    "masks": {"mlm": MlmConfig()},
    "spans": {"mlm": MlmConfig(), "sbo": SboConfig()},
    "replaced tokens": {"mlm": MlmConfig(), "rtd": ReplacedTokenConfig()},
}
UNREACHED = {"language", "convolution"}  # of rows without languages; of a generator of one layer
DETECTORS = {name: config for name, config in SMALL.items() if config.has_generator}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_its_own_recipe_is_of_it(family: type[ModelConfig]) -> None:
    assert type(load(family.recipe).model) is family


@pytest.mark.parametrize("terms", OBJECTIVES)
@pytest.mark.parametrize("name", DETECTORS)
def test_it_is_trained_by_any_objective_but_xlnets(name: str, terms: str) -> None:
    """Every parameter that the microbatch reaches has a finite gradient after it."""
    torch.manual_seed(0)
    module = compose(DETECTORS[name], OBJECTIVES[terms])
    initialise(module, 0.1)
    sums = module(make_batch([9, 20, 5], VOCABULARY))
    torch.stack([term.loss_sum for term in sums.terms]).sum().backward()
    for parameter_name, parameter in module.named_parameters():
        if UNREACHED & set(parameter_name.split(".")):
            continue
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", SMALL)
def test_it_is_exported_and_read_back(name: str, tmp_path: Path) -> None:
    """With its main heads and alone, bit for bit."""
    for heads in {SMALL[name].main_heads, "none"}:
        module = build_network(SMALL[name], heads)
        initialise(module, 0.1)
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        out = tmp_path / heads
        export_model(parameters.__getitem__, SMALL[name], {}, open_store(str(out)), heads)
        found = load_pretrained(out, heads)
        assert found.tensors.keys() == parameters.keys()
        assert all(torch.equal(found.tensors[name], parameters[name]) for name in parameters)


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.just(10**30)),
    *(st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
)


@given(st.sampled_from(list(SMALL)), st.data())
def test_any_values_in_a_folder_are_read_or_refused(name: str, data: st.DataObject) -> None:
    """Somebody else wrote the file: no value ends in another error, in a full memory or in 10^30 layers."""
    fields = hf_format_of(SMALL[name], SMALL[name].main_heads).fields
    keys = data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    lacking = data.draw(st.sampled_from(sorted(fields)))
    changed = fields | {key: data.draw(VALUES, key) for key in keys}
    for found in (changed, {key: value for key, value in changed.items() if key != lacking}):
        try:
            assert read_config(found).layers <= 10_000
        except (ModelError, ValidationError):
            continue
