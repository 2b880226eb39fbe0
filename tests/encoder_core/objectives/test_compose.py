"""Terms together are the sum of the terms alone, and any set of terms is either trained or refused with a reason."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.compose import compose, refusals
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.distil import CosineConfig, DistilConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import RowFacts, TermConfig, TermSetting, WeightSchedule, last_weight, weight_at
from tests.support.models.parity import make_batch, random_weights
from tests.support.models.terms import SIZE, families

MODELS: tuple[ModelConfig, ...] = (
    *families().values(),
    RobertaConfig(**SIZE),
    ElectraConfig(**SIZE, embedding=8, generator_divisor=2),
    DebertaV2Config(**SIZE, buckets=8, convolution=3),
)
weights = st.floats(0.1, 10.0) | st.builds(
    WeightSchedule, start=st.floats(0, 5), end=st.floats(0.1, 5), steps=st.integers(1, 100)
)
TERMS: Mapping[str, st.SearchStrategy[TermConfig]] = {
    "mlm": st.builds(MlmConfig, weight=weights),
    "nsp": st.builds(NspConfig, weight=weights),
    "sop": st.builds(SopConfig, weight=weights),
    "sbo": st.builds(SboConfig, weight=weights),
    "retromae": st.builds(RetromaeConfig, weight=weights),
    "condenser": st.builds(CondenserConfig, weight=weights, early=st.sampled_from([None, 0, 1, 2])),
    "rtd": st.builds(
        ReplacedTokenConfig, weight=weights, embeddings=st.sampled_from(["shared", "gradient_disentangled"])
    ),
    "plm": st.builds(PlmConfig, weight=weights),
    "contrastive": st.builds(ContrastiveConfig, weight=weights),
    "distil": st.builds(
        DistilConfig,
        weight=weights,
        teachers=st.just((TeacherSource(uri="somewhere", model=BertConfig(**SIZE)),)),
    ),
    "cosine": st.builds(CosineConfig, weight=weights),
}
facts = st.builds(
    RowFacts,
    packing=st.just("some"),
    label=st.sampled_from([None, "next", "order"]),
    texts=st.booleans(),
    lanes=st.booleans(),
    unit=st.sampled_from(["token", "span"]),
)
sets = st.sets(st.sampled_from(list(TERMS)), min_size=1).flatmap(
    lambda names: st.fixed_dictionaries({name: TERMS[name] for name in TERMS if name in names})
)


@given(model=st.sampled_from((*MODELS, XlnetConfig(**SIZE))), terms=sets, rows=st.none() | facts)
def test_any_set_is_trained_or_refused_with_a_reason(
    model: ModelConfig, terms: dict[str, TermConfig], rows: RowFacts | None
) -> None:
    found = refusals(TermSetting(model, terms, rows))
    assert all(refusal.path and refusal.what and refusal.remedy for refusal in found)
    assert len(found) == len(set(found))
    if refusals(TermSetting(model, terms)):
        with pytest.raises(ModelError):
            compose(model, terms)
        return
    with on_meta():
        module = compose(model, terms)
    counted = module.target_counts(make_batch([9, 20], 50, segments=True))
    assert {name.split("_")[0] for name in counted} == terms.keys()


beside = st.sampled_from(["nsp", "sop", None]).flatmap(
    lambda pair: st.fixed_dictionaries(
        {"mlm": TERMS["mlm"]} | ({pair: TERMS[pair]} if pair else {}), optional={"sbo": TERMS["sbo"]}
    )
)


@pytest.mark.long
@pytest.mark.heavy
@settings(max_examples=20)
@given(model=st.sampled_from(MODELS), terms=beside, seed=st.integers(0, 99))
def test_terms_of_one_network_sum_to_what_they_are_alone(
    model: ModelConfig, terms: dict[str, TermConfig], seed: int
) -> None:
    together, batch = built(model, terms), spans(seed)
    found = by_name(together(batch))
    gradient = gradients(together, [together(batch)])
    summed: dict[str, Tensor] = {}
    for name, term in terms.items():
        alone = shared(compose(model, {"mlm": terms["mlm"], name: term}), together)
        outcome = alone(batch)
        torch.testing.assert_close(by_name(outcome)[name], found[name], rtol=1e-10, atol=1e-10)
        only = replace(outcome, terms=tuple(part for part in outcome.terms if part.name == name))
        for parameter, value in gradients(alone, [only]).items():
            summed[parameter] = summed.get(parameter, torch.zeros_like(value)) + value
    assert summed.keys() == gradient.keys()
    for name, value in summed.items():
        torch.testing.assert_close(value, gradient[name], rtol=1e-8, atol=1e-10)


@pytest.mark.long
@pytest.mark.heavy
@settings(max_examples=20)
@given(model=st.sampled_from(MODELS), terms=beside, seed=st.integers(0, 99), rtd=TERMS["rtd"])
def test_a_generator_learns_what_its_network_alone_would_and_the_discriminator_sees_the_same(
    model: ModelConfig, terms: dict[str, TermConfig], seed: int, rtd: ReplacedTokenConfig
) -> None:
    batch = spans(seed)
    module = built(model, terms | {"rtd": rtd})
    torch.manual_seed(seed)
    found = by_name(module(batch))
    assert not isinstance(model, XlnetConfig | BartConfig)
    generator = compose(model.generator, terms).double().eval()
    state = {name.removeprefix("generator."): p for name, p in module.state_dict().items()}
    generator.load_state_dict({name: state[name] for name in generator.state_dict()})
    for name, value in by_name(generator(batch)).items():
        torch.testing.assert_close(value, found[name], rtol=1e-10, atol=1e-10)
    pair = shared(compose(model, {"mlm": terms["mlm"], "rtd": rtd}), module)
    torch.manual_seed(seed)
    torch.testing.assert_close(by_name(pair(batch))["rtd"], found["rtd"], rtol=1e-10, atol=1e-10)
    assert {name.removeprefix("generator.").split(".")[0] for name in dict(module.named_parameters())} >= {
        *({"pair_head"} if {"nsp", "sop"} & terms.keys() else ()),
        *({"boundary_head"} if "sbo" in terms else ()),
    }


@given(st.floats(0, 9), st.floats(0.1, 9), st.integers(1, 500), st.integers(0, 1000))
def test_a_weight_goes_in_a_straight_line_and_stays(start: float, end: float, steps: int, step: int) -> None:
    schedule = WeightSchedule(start=start, end=end, steps=steps)
    assert weight_at(schedule, 0) == start
    assert weight_at(schedule, steps + step) == pytest.approx(end) == last_weight(schedule)
    inside = weight_at(schedule, step)
    assert min(start, end) - 1e-9 <= inside <= max(start, end) + 1e-9
    if step < steps:
        assert weight_at(schedule, step + 1) - inside == pytest.approx((end - start) / steps, abs=1e-9)
    assert weight_at(end, step) == last_weight(end) == end


def spans(seed: int) -> Batch:
    """Rows with labels, segments and spans of two targets."""
    batch = make_batch([9, 30, 14], 50, segments=True, seed=seed)
    at = torch.tensor([2, 3, 6, 13, 14, 15, 20, 42, 43])
    return replace(batch, target_positions=at, target_ids=batch.tokens[at])


def built(model: ModelConfig, terms: Mapping[str, TermConfig]) -> ObjectiveModule:
    return random_weights(compose(model, terms)).double().eval()


def shared(alone: ObjectiveModule, together: ObjectiveModule) -> ObjectiveModule:
    """With the weights of a larger module."""
    state = together.state_dict()
    alone.double().eval().load_state_dict({name: state[name] for name in alone.state_dict()})
    return alone


def by_name(outcome: LossSums) -> dict[str, Tensor]:
    return {term.name: term.loss_sum for term in outcome.terms}


def gradients(module: ObjectiveModule, outcomes: list[LossSums]) -> dict[str, Tensor]:
    module.zero_grad()
    torch.stack([term.weight * term.loss_sum for outcome in outcomes for term in outcome.terms]).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
