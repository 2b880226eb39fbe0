"""muP: what depends on width and how, the same bits at the base's own width, and a literal network of table 8."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import FAMILIES, ModelConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.mup import mup_base
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.sizes import Mup
from encoder_core.objectives.compose import compose
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.mup import MupFactors, mup_scales
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import TermConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import hidden_matrices, parameter_groups
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import AdamWConfig, MuonConfig
from encoder_core.optim.updates import set_update
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.tiny import tiny
from tests.support.models.parity import make_batch

VOCABULARY, HEAD = 64, 16
MASKS: dict[str, TermConfig] = {"mlm": MlmConfig()}
SMALL: dict[str, ModelConfig] = {
    family.name: tiny(load(family.recipe)).model.with_tokenizer(VOCABULARY, 0) for family in FAMILIES
}
REFUSED = {"XLM", "XLNet", "BART"}
OBJECTIVES: dict[str, dict[str, TermConfig]] = {
    "masks": MASKS,
    "spans": MASKS | {"sbo": SboConfig()},
    "pairs": MASKS | {"nsp": NspConfig()},
    "replaced tokens": MASKS | {"rtd": ReplacedTokenConfig()},
    "vectors": MASKS | {"retromae": RetromaeConfig(), "condenser": CondenserConfig()},
}


def bert(width: int, base: int | None, **fields: Any) -> BertConfig:
    shape = {"layers": 2, "hidden": width, "heads": width // HEAD, "feed_forward": 2 * width}
    mup = None if base is None else Mup(hidden=base)
    return BertConfig(
        **shape | {"vocab": VOCABULARY, "max_length": 32} | fields,
        mup=mup,
        dropout=0.0,
        attention_dropout=0.0,
    )


def fresh(config: ModelConfig, terms: Mapping[str, TermConfig] = MASKS, seed: int = 0) -> ObjectiveModule:
    model = compose(config, terms)
    torch.manual_seed(seed)
    factors = {name: scale.fresh for name, scale in mup_scales(config, terms).items()}
    initialise(model, 0.05, config.initializer, factors)
    return model


def test_every_parameter_of_a_bert_is_scaled_by_the_table() -> None:
    config = bert(96, 48, feed_forward=96 * 3)
    config = config.model_copy(update={"mup": Mup(hidden=48, feed_forward=48)})
    scales = mup_scales(config, OBJECTIVES["pairs"])
    half, sixth = MupFactors(2**-0.5, 1 / 2, 2**-0.5), 1 / 6
    expected: dict[str, MupFactors] = {}
    for layer in (f"encoder.layers.{i}." for i in range(2)):
        for name in ("query", "key", "value", "output"):
            expected[f"{layer}attention.{name}.weight"] = half
        expected[f"{layer}feed_forward.up.weight"] = half
        expected[f"{layer}feed_forward.down.weight"] = MupFactors(sixth**0.5, sixth, 1 / math.sqrt(18))
    expected["head.dense.weight"] = expected["pair_head.pooler.weight"] = half
    expected["pair_head.classifier.weight"] = MupFactors(1 / 2, 1 / 2, 0.0)
    expected |= dict.fromkeys(("head.norm.weight", "head.norm.bias"), MupFactors(1 / 2, 1 / 2, 0.0))
    assert scales.keys() == expected.keys()
    for name, scale in expected.items():
        moved = scale if scale.muon_rate else scale._replace(muon_rate=scales[name].muon_rate)
        assert scales[name] == pytest.approx(moved), name


@pytest.mark.long
@settings(max_examples=12)
@given(st.tuples(*(st.integers(1, 9) for _ in range(3))), st.sampled_from(sorted(SMALL.keys() - REFUSED)))
def test_a_base_of_a_base_is_a_base(widths: tuple[int, int, int], family: str) -> None:
    """Factors multiply, so which model was tuned first does not matter."""
    config = SMALL[family]
    narrow, middle, wide = (_at(config, 32 * width) for width in widths)

    def factors(model: ModelConfig, base: ModelConfig) -> dict[str, MupFactors]:
        mup = Mup(hidden=base.hidden, feed_forward=base.feed_forward)
        return mup_scales(model.model_copy(update={"mup": mup}), MASKS)

    first, second, both = factors(middle, narrow), factors(wide, middle), factors(wide, narrow)
    assert first.keys() == second.keys() == both.keys()
    for name, whole in both.items():
        parts = zip(first[name], second[name], strict=True)
        assert whole == pytest.approx([one * other for one, other in parts]), name


def _at(config: ModelConfig, width: int) -> ModelConfig:
    """The model at another width, with heads of 32."""
    shape: dict[str, object] = {"hidden": width, "heads": width // 32, "feed_forward": 2 * width}
    if isinstance(config, EuroBertConfig):
        shape["key_value_heads"] = None
    if isinstance(config, ElectraConfig):
        shape |= {"embedding": width, "generator_divisor": 1}
    return config.model_copy(update=shape)


@pytest.mark.parametrize("terms", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("name", SMALL)
def test_every_family_is_scaled_or_refused(name: str, terms: dict[str, TermConfig]) -> None:
    """All matrices inside layers, of both networks if there are two; no table, and no bias but of a head's norm."""
    config = SMALL[name].model_copy(update={"mup": Mup(hidden=32)})
    if name in REFUSED:
        with pytest.raises(ModelError):
            mup_base(config)
        return
    scales, model = mup_scales(config, terms), compose(config, terms)
    assert all(scales[matrix].rate == 1 / 4 for matrix in hidden_matrices(model))
    tables = {id(table.weight) for table in model.modules() if isinstance(table, nn.Embedding)}
    shapes = dict(model.named_parameters())
    for scaled in scales:
        assert id(shapes[scaled]) not in tables
        assert shapes[scaled].ndim > 1 or "head." in scaled
        assert not scaled.endswith("bias") or "norm" in scaled


@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "muon"])
@pytest.mark.parametrize("name", sorted(SMALL.keys() - REFUSED))
def test_at_the_width_of_the_base_nothing_changes(name: str, muon: bool) -> None:
    """Fresh weights have the same bits, and the groups of parameters are the same."""
    plain = SMALL[name]
    based = plain.model_copy(update={"mup": Mup(hidden=plain.hidden)})
    one, other = fresh(plain), fresh(based)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    scales = mup_scales(based, MASKS)
    assert scales
    assert set(scales.values()) == {MupFactors(1.0, 1.0, 1.0)}
    rates = {name: scale.rate for name, scale in scales.items()}
    groups = (
        parameter_groups(one, 0.1, matrices=muon),
        parameter_groups(other, 0.1, matrices=muon, rates=rates),
    )
    for ours, theirs in zip(*groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
        assert [p.shape for p in ours["params"]] == [p.shape for p in theirs["params"]]


def test_fresh_weights_are_the_same_draws_scaled() -> None:
    config = bert(64, 16)
    plain, scaled = fresh(config.model_copy(update={"mup": None})), fresh(config)
    scales = mup_scales(config, MASKS)
    for (name, one), other in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(other, one * (scales[name].fresh if name in scales else 1.0)), name


def test_decay_does_not_depend_on_width() -> None:
    """AdamW multiplies it by the rate, which muP lowers."""
    config = bert(64, 16)
    rates = {name: scale.rate for name, scale in mup_scales(config, MASKS).items()}
    groups = parameter_groups(compose(config, MASKS), 0.1, decayed="all", rates=rates)
    assert {group["lr_scale"] for group in groups} == {1.0, 1 / 4}
    assert {group["lr_scale"] * group["weight_decay"] for group in groups} == {0.1}


@pytest.mark.parametrize(
    ("model", "mup"),
    [
        (bert(64, None), Mup(hidden=24)),  # heads of 16
        (bert(96, None, feed_forward=100), Mup(hidden=32)),
        (EuroBertConfig(layers=1, hidden=64, heads=4, key_value_heads=2, feed_forward=64), Mup(hidden=16)),
        (EuroBertConfig(layers=1, hidden=64, heads=4, feed_forward=64, tied_decoder=True), Mup(hidden=32)),
        (ElectraConfig(layers=1, hidden=64, heads=4, feed_forward=64, embedding=32), Mup(hidden=32)),
    ],
)
def test_a_base_that_cannot_be_is_refused(model: ModelConfig, mup: Mup) -> None:
    with pytest.raises(ModelError):
        mup_scales(model.model_copy(update={"mup": mup, "vocab": VOCABULARY}), MASKS)


def test_a_generator_that_stops_projecting_embeddings_is_refused() -> None:
    config = ElectraConfig(layers=1, hidden=128, heads=8, feed_forward=64, embedding=16, vocab=VOCABULARY)
    config = config.model_copy(update={"mup": Mup(hidden=64)})
    with pytest.raises(ModelError):
        mup_scales(config, OBJECTIVES["replaced tokens"])


def test_the_norm_before_the_decoder_is_table_8s_multiplier() -> None:
    """A literal network, whose norm is followed by the multiplier and learns at the whole rate, has the same losses."""
    config = bert(64, 16)
    ours, literal = fresh(config).double(), fresh(config).double()
    rates = {name: scale.rate for name, scale in mup_scales(config, MASKS).items()}
    norm = literal.get_submodule("head.norm")
    nn.init.ones_(norm.get_parameter("weight"))
    norm.register_forward_hook(lambda module, inputs, output: output / 4)
    plain = {name: rate for name, rate in rates.items() if not name.startswith("head.norm")}
    settings = AdamWConfig(lr=1.0, eps=1e-20, weight_decay=0.1)
    losses = [
        trained(model, AdamW(parameter_groups(model, 0.1, rates=its), settings), 1e-2, steps=6)
        for model, its in ((ours, rates), (literal, plain))
    ]
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def trained(model: ObjectiveModule, optimizer: torch.optim.Optimizer, rate: float, steps: int) -> list[float]:
    """The loss of each step, on one batch."""
    batch, losses = make_batch([16] * 4, VOCABULARY), []
    for step in range(steps):
        (term,) = model(batch).terms
        loss = term.loss_sum / term.targets
        optimizer.zero_grad()
        loss.backward()
        set_update(optimizer, lr=rate, count=step + 1)
        optimizer.step()
        losses.append(loss.item())
    return losses


Optimizers = Mapping[str, tuple[Callable[[ObjectiveModule, dict[str, MupFactors]], torch.optim.Optimizer], float]]


def _adamw(model: ObjectiveModule, scales: dict[str, MupFactors]) -> torch.optim.Optimizer:
    groups = parameter_groups(model, 0.0, rates={name: scale.rate for name, scale in scales.items()})
    return AdamW(groups, AdamWConfig(lr=1.0, eps=1e-12))


def _muon(model: ObjectiveModule, scales: dict[str, MupFactors]) -> torch.optim.Optimizer:
    inside = hidden_matrices(model)
    rates = {name: s.muon_rate if name in inside else s.rate for name, s in scales.items()}
    return Muon(parameter_groups(model, 0.0, matrices=True, rates=rates), MuonConfig(lr=1.0))


OPTIMIZERS: Optimizers = {"adamw": (_adamw, 2e-3), "muon": (_muon, 5e-3)}


def moved(config: ModelConfig, optimizer: str, steps: int) -> dict[str, float]:
    """By how much each block's output and the logits change in some steps: root mean squares."""
    made, rate = OPTIMIZERS[optimizer]
    model, batch = fresh(config), make_batch([16] * 4, VOCABULARY)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("attention.output", "feed_forward.down")):
            module.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.detach()}))

    def look() -> dict[str, Tensor]:
        seen["logits"] = model.logits(batch).detach()  # type: ignore[operator]
        return dict(seen)

    before = look()
    trained(model, made(model, mup_scales(config, MASKS)), rate, steps)
    return {name: (after - before[name]).square().mean().sqrt().item() for name, after in look().items()}


def slopes(configs: Mapping[int, ModelConfig], optimizer: str, steps: int) -> dict[str, float]:
    """By which power of the width the changes grow: least squares over logarithms."""
    found = {width: moved(config, optimizer, steps) for width, config in configs.items()}
    x = torch.tensor([math.log(width) for width in found])
    x = x - x.mean()
    return {
        name: float((x * torch.tensor([math.log(its[name]) for its in found.values()])).sum() / (x * x).sum())
        for name in next(iter(found.values()))
    }


def check_coordinates(widths: tuple[int, ...], optimizer: str, steps: int) -> None:
    with_mup = slopes({width: bert(width, widths[0]) for width in widths}, optimizer, steps)
    without = slopes({width: bert(width, None) for width in widths}, optimizer, steps)
    assert max(map(abs, with_mup.values())) < 0.3, with_mup
    assert min(without.values()) > max(with_mup.values()) + 0.2, without
    assert sum(without.values()) / len(without) > 0.5, without


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_move_activations_as_much_from_64_to_512(optimizer: str) -> None:
    check_coordinates((64, 128, 256, 512), optimizer, steps=8)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", [RobertaConfig, ModernBertConfig])
def test_other_families_move_as_much_too(family: type[RobertaConfig] | type[ModernBertConfig], optimizer: str) -> None:
    configs = {
        width: family(
            layers=2, hidden=width, heads=width // HEAD, feed_forward=2 * width, max_length=32, vocab=VOCABULARY,
            mup=Mup(hidden=64), dropout=0.0, attention_dropout=0.0,
        )
        for width in (64, 128, 256, 512)
    }  # fmt: skip
    assert max(map(abs, slopes(configs, optimizer, 6).values())) < 0.3
