"""Every official size, built on the meta device: transformers' parameters exactly, and the published count."""

import pytest
import torch
import transformers

from encoder_core.families import deberta, electra
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.objectives.modules.detection import discriminator_model
from encoder_core.objectives.modules.network import build_network, masked_language_model
from encoder_core.objectives.replaced import ReplacedTokenConfig
from tests.support.models import official

SIZES: dict[str, tuple[ModelConfig, Heads, float, float]] = {
    # name: configuration, heads, published millions of parameters from, to
    "roberta-base": (official.ROBERTA_BASE, "mlm", 120, 125),
    "roberta-large": (official.ROBERTA_LARGE, "mlm", 350, 356),
    "bert-tiny": (official.BERT_TINY, "mlm_pair", 4.4, 4.5),
    "bert-mini": (official.BERT_MINI, "mlm_pair", 11.2, 11.4),
    "bert-small": (official.BERT_SMALL, "mlm_pair", 28.8, 29.4),
    "bert-medium": (official.BERT_MEDIUM, "mlm_pair", 41.4, 42),
    "bert-base": (official.BERT_BASE, "mlm_pair", 109, 111),
    "bert-large": (official.BERT_LARGE, "mlm_pair", 334, 340),
    "distilbert-base": (official.DISTILBERT_BASE, "mlm", 66, 68),
    "spanbert-base": (official.SPANBERT_BASE, "mlm", 108, 110),
    "spanbert-large": (official.SPANBERT_LARGE, "mlm", 333, 340),
    "albert-base": (official.ALBERT_BASE, "mlm_pair", 11.7, 12),
    "albert-large": (official.ALBERT_LARGE, "mlm_pair", 17.7, 18),
    "albert-xlarge": (official.ALBERT_XLARGE, "mlm_pair", 58.7, 60),
    "albert-xxlarge": (official.ALBERT_XXLARGE, "mlm_pair", 220, 235),
    "electra-small": (official.ELECTRA_SMALL, "rtd", 13.5, 14),
    "electra-base": (official.ELECTRA_BASE, "rtd", 109, 110),
    "electra-large": (official.ELECTRA_LARGE, "rtd", 334, 336),
    "modernbert-base": (official.MODERNBERT_BASE, "mlm", 149, 150),
    "modernbert-large": (official.MODERNBERT_LARGE, "mlm", 395, 396),
    "xlm-mlm-tlm-base": (official.XLM_BASE, "mlm", 248, 250),
    "xlnet-base": (official.XLNET_BASE, "plm", 116, 118),
    "xlnet-large": (official.XLNET_LARGE, "plm", 358, 364),
    # microsoft/DeBERTa's README counts encoders without the word embeddings
    "deberta-base": (official.DEBERTA_BASE, "mlm", 95, 105),
    "deberta-large": (official.DEBERTA_LARGE, "mlm", 332.5, 367.5),
    "deberta-xlarge": (official.DEBERTA_XLARGE, "mlm", 665, 735),
    "deberta-v2-xlarge": (official.DEBERTA_V2_XLARGE, "mlm", 674.5, 745.5),
    "deberta-v2-xxlarge": (official.DEBERTA_V2_XXLARGE, "mlm", 1254, 1386),
    "deberta-v3-xsmall": (official.DEBERTA_V3_XSMALL, "mlm", 20.9, 23.1),
    "deberta-v3-small": (official.DEBERTA_V3_SMALL, "mlm", 41.8, 46.2),
    "deberta-v3-base": (official.DEBERTA_V3_BASE, "mlm", 81.7, 90.3),
    "deberta-v3-large": (official.DEBERTA_V3_LARGE, "mlm", 288.8, 319.2),
    # the published counts and, untied, as many parameters again as there are in the word embeddings
    "eurobert-210m": (official.EUROBERT_210M, "mlm", 210 + 98, 212 + 99),
    "eurobert-610m": (official.EUROBERT_610M, "mlm", 607 + 147, 610 + 148),
    "eurobert-2.1b": (official.EUROBERT_2_1B, "mlm", 2100 + 295, 2110 + 296),
}


@pytest.mark.parametrize(("config", "heads", "low", "high"), SIZES.values(), ids=SIZES)
def test_official_sizes_have_the_published_count_and_transformers_shapes(
    config: ModelConfig, heads: Heads, low: float, high: float
) -> None:
    is_deberta = config.family.startswith("deberta")
    if is_deberta:  # transformers lacks the mask decoder
        config = config.model_copy(update={"mask_decoder": "plain"})
    their = hf_format_of(config, heads)
    with torch.device("meta"):
        ours = build_network(config, heads)
        described = transformers.AutoConfig.for_model(**their.fields)
        theirs = getattr(transformers, str(their.architecture))(described)
    count = _size(ours)
    if is_deberta:
        words = ours.get_parameter("encoder.embeddings.word.weight").numel()
        count = _size(ours.get_submodule("encoder")) - words
    assert low <= count / 1e6 <= high

    folded = {fold.theirs for fold in their.table.folds}
    names = their.table.their_names(their.layers)
    assert {names[name]: parameter.shape for name, parameter in ours.named_parameters()} == {
        name: parameter.shape for name, parameter in theirs.named_parameters() if name not in folded
    }


@pytest.mark.parametrize(
    ("config", "hidden", "heads", "feed_forward"),
    [
        (official.ELECTRA_SMALL, 64, 1, 256),
        (official.ELECTRA_BASE, 256, 4, 1024),
        (official.ELECTRA_LARGE, 256, 4, 1024),
    ],
)
def test_electra_generators_are_the_published_share(
    config: electra.ElectraConfig, hidden: int, heads: int, feed_forward: int
) -> None:
    generator = config.generator
    assert (generator.hidden, generator.heads, generator.feed_forward) == (hidden, heads, feed_forward)
    assert (generator.layers, generator.embedding) == (config.layers, config.embedding)


def test_albert_factorises_its_embeddings() -> None:
    """V * E + E * H against BERT's V * H (ALBERT, section 3.1)."""
    with torch.device("meta"):
        encoder = masked_language_model(official.ALBERT_BASE).encoder
    table = encoder.get_parameter("embeddings.word.weight")
    projection = encoder.get_parameter("projection.weight")
    assert table.numel() + projection.numel() == 30_000 * 128 + 128 * 768


@pytest.mark.parametrize(
    ("config", "backbone", "words"),
    [
        (official.DEBERTA_V3_XSMALL, 22, 48),
        (official.DEBERTA_V3_SMALL, 44, 98),
        (official.DEBERTA_V3_BASE, 86, 98),
        (official.DEBERTA_V3_LARGE, 304, 131),
    ],
    ids=["xsmall", "small", "base", "large"],
)
def test_deberta_v3_has_the_published_parameters(config: deberta.DebertaV2Config, backbone: int, words: int) -> None:
    """The discriminator alone, as published: millions of parameters without the words, and of the words."""
    with torch.device("meta"):
        alone = discriminator_model(config)
        both = ReplacedTokenConfig(embeddings="gradient_disentangled").build(config)
    table = alone.encoder.embeddings.word.weight.numel()
    assert table / 1e6 == pytest.approx(words, abs=1.2)
    assert (_size(alone) - table) / 1e6 == pytest.approx(backbone, abs=0.7)
    assert _size(both) == _size(alone) + _size(both.generator)  # E_delta is as large as embeddings of its own
    assert both.generator.encoder.embeddings.word.weight.shape == alone.encoder.embeddings.word.weight.shape
    assert 2 * len(both.generator.encoder.layers) == len(alone.encoder.layers)


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
