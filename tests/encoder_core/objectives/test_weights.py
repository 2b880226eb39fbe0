"""Counted parameters against the networks that torch builds: every family and term, sizes drawn."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
from torch import nn

from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import FAMILIES, ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.xlm import INNER_RATIO, XlmConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.compose import compose, refusals, weight_count
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.diffusion import DiffusionConfig
from encoder_core.objectives.distil import DistilConfig, HiddenConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.network import build_network
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import TermConfig, TermSetting
from encoder_core.objectives.weights import detector_weight_count, masked_lm_weight_count

OWN: Mapping[type[ModelConfig], dict[str, tuple[object, ...]]] = {
    BertConfig: {
        "token_types": (0, 1, 2, 3),
        "position": ("absolute", "relative_key", "relative_key_query"),
    },
    AlbertConfig: {"token_types": (1, 3), "embedding": (3, 8, 11), "groups": (1, 2, 3)},
    ElectraConfig: {"embedding": (3, 8, 11), "generator_divisor": (1, 2)},
    DebertaConfig: {"mask_decoder": ("enhanced", "plain")},
    DebertaV2Config: {
        "mask_decoder": ("enhanced", "plain"),
        "buckets": (4, 10),
        "convolution": (None, 3),
        "generator_layers": (None, 1),
    },
    EuroBertConfig: {"key_value_heads": (None, 1, 2), "tied_decoder": (True, False)},
    XlmConfig: {"languages": ((), ("en",), ("en", "fr", "sw"))},
}
"""Values of what each family has of its own, where parameters depend on it."""
TEACHER = TeacherSource(uri="somewhere", model=BertConfig(layers=2, hidden=8, heads=2, feed_forward=9, vocab=50))
TERMS: Mapping[str, Callable[[Random], TermConfig]] = {
    "mlm": lambda _: MlmConfig(),
    "clm": lambda _: ClmConfig(),
    "diffusion": lambda _: DiffusionConfig(),
    "nsp": lambda _: NspConfig(),
    "sop": lambda _: SopConfig(),
    "sbo": lambda _: SboConfig(),
    "retromae": lambda _: RetromaeConfig(),
    "condenser": lambda rng: CondenserConfig(layers=rng.randint(1, 3), early=0),
    "rtd": lambda rng: ReplacedTokenConfig(embeddings=rng.choice(["shared", "gradient_disentangled"])),
    "plm": lambda _: PlmConfig(),
    "denoise": lambda _: DenoiseConfig(),
    "contrastive": lambda rng: ContrastiveConfig(projection=rng.random() < 0.5),
    "distil": lambda _: DistilConfig(teachers=(TEACHER,)),
    "hidden": lambda rng: HiddenConfig(projection=rng.choice([8, None])),
}


def drawn_model(family: type[ModelConfig], rng: Random) -> ModelConfig:
    """A model of small sizes, which have few common divisors."""
    heads = rng.choice([2, 4])
    hidden = heads * 2 * rng.randint(1, 6)
    sizes: dict[str, Any] = {
        "layers": rng.randint(3, 5),
        "hidden": hidden,
        "heads": heads,
        "feed_forward": INNER_RATIO * hidden if family is XlmConfig else rng.randint(1, 40),
        "max_length": rng.randint(2, 40),
        "vocab": rng.randint(20, 90),
        "pad_id": rng.randint(0, 9),
    }
    own = {name: rng.choice(values) for name, values in OWN.get(family, {}).items()}
    return family.model_validate(sizes | own)


def drawn_terms(model: ModelConfig, rng: Random) -> dict[str, TermConfig]:
    """Terms that can be trained together on the model: in a drawn order, each is added unless it is refused."""
    names = rng.sample([*TERMS], len(TERMS))[: rng.randint(1, len(TERMS))]
    terms: dict[str, TermConfig] = {}
    for name in [
        rng.choice(["mlm", "mlm", "mlm", "plm", "denoise", *TERMS]),
        *names,
        "mlm",
        "plm",
        "denoise",
    ]:
        more = terms | {name: TERMS[name](rng)}
        terms = terms if refusals(TermSetting(model, more)) else more
    return terms


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_parameters_are_those_that_torch_builds(family: type[ModelConfig]) -> None:
    for seed in range(12):
        rng = Random(f"{family.name} {seed}")
        model = drawn_model(family, rng)
        terms = drawn_terms(model, rng)
        with on_meta():
            assert weight_count(model, terms) == _parameters(compose(model, terms)), (model, terms)
            assert masked_lm_weight_count(model) == _parameters(build_network(model, "mlm")), model
            if model.has_generator:
                assert detector_weight_count(model) == _parameters(build_network(model, "rtd")), model


def test_an_unknown_vocabulary_is_not_counted() -> None:
    with pytest.raises(ModelError):
        weight_count(BertConfig(layers=2, hidden=8, heads=2, feed_forward=9), {"mlm": MlmConfig()})
