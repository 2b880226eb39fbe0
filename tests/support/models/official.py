"""The shapes of the official models, as their papers and released files state them."""

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig


def _bert(layers: int, hidden: int, vocab: int = 30_522) -> BertConfig:
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 64, feed_forward=4 * hidden, vocab=vocab)


BERT_TINY = _bert(2, 128)
BERT_MINI = _bert(4, 256)
BERT_SMALL = _bert(4, 512)
BERT_MEDIUM = _bert(8, 512)
BERT_BASE = _bert(12, 768)
BERT_LARGE = _bert(24, 1024)

DISTILBERT_BASE = _bert(6, 768).model_copy(update={"token_types": 0, "initializer": "normal"})
SPANBERT_BASE = _bert(12, 768, vocab=28_996).model_copy(update={"initializer": "normal"})
SPANBERT_LARGE = _bert(24, 1024, vocab=28_996).model_copy(update={"initializer": "normal"})

ROBERTA_BASE = RobertaConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=50_265, initializer="normal")
ROBERTA_LARGE = RobertaConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal")


def _albert(layers: int, hidden: int, heads: int) -> AlbertConfig:
    return AlbertConfig(layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden, vocab=30_000)


ALBERT_BASE = _albert(12, 768, 12)
ALBERT_LARGE = _albert(24, 1024, 16)
ALBERT_XLARGE = _albert(24, 2048, 16)
ALBERT_XXLARGE = _albert(12, 4096, 64)


def _electra(layers: int, hidden: int, embedding: int, generator_divisor: int) -> ElectraConfig:
    return ElectraConfig(
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        feed_forward=4 * hidden,
        embedding=embedding,
        generator_divisor=generator_divisor,
        vocab=30_522,
    )


ELECTRA_SMALL = _electra(12, 256, 128, 4)
ELECTRA_BASE = _electra(12, 768, 768, 3)
ELECTRA_LARGE = _electra(24, 1024, 1024, 4)

DEBERTA_BASE = DebertaConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=50_265, initializer="normal")
DEBERTA_LARGE = DebertaConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal")
DEBERTA_XLARGE = DEBERTA_LARGE.model_copy(update={"layers": 48})

DEBERTA_V2_XLARGE = DebertaV2Config(
    layers=24, hidden=1536, heads=24, feed_forward=6144, vocab=128_100, convolution=3, initializer="normal"
)
DEBERTA_V2_XXLARGE = DEBERTA_V2_XLARGE.model_copy(update={"layers": 48})


def _v3(layers: int, hidden: int) -> DebertaV2Config:
    shape = DEBERTA_V2_XLARGE.model_copy(update={"layers": layers, "hidden": hidden, "convolution": None})
    return shape.model_copy(update={"heads": hidden // 64, "feed_forward": 4 * hidden})


DEBERTA_V3_XSMALL, DEBERTA_V3_SMALL = _v3(12, 384), _v3(6, 768)
DEBERTA_V3_BASE, DEBERTA_V3_LARGE = _v3(12, 768), _v3(24, 1024)

MODERNBERT_BASE = ModernBertConfig(layers=22, hidden=768, heads=12, feed_forward=1152, vocab=50_368)
MODERNBERT_LARGE = ModernBertConfig(layers=28, hidden=1024, heads=16, feed_forward=2624, vocab=50_368)

EUROBERT_210M = EuroBertConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=128_256)
EUROBERT_610M = EuroBertConfig(layers=26, hidden=1152, heads=18, key_value_heads=6, feed_forward=4096, vocab=128_256)
EUROBERT_2_1B = EuroBertConfig(layers=32, hidden=2304, heads=18, key_value_heads=6, feed_forward=6144, vocab=128_256)

NEOBERT_BASE = NeoBertConfig(layers=28, hidden=768, heads=12, feed_forward=2048, vocab=30_522)

XNLI15 = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
"""The languages of the published XLM, in the order of its configuration."""
XLM_BASE = XlmConfig(layers=12, hidden=1024, heads=8, feed_forward=4096, vocab=95_000, languages=XNLI15)

XLNET_BASE = XlnetConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=32_000, initializer="normal")
XLNET_LARGE = XlnetConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=32_000, initializer="normal")

BART_BASE = BartConfig(layers=6, hidden=768, heads=12, feed_forward=3072, vocab=50_265)
BART_LARGE = BartConfig(layers=12, hidden=1024, heads=16, feed_forward=4096, vocab=50_265)
