"""The bundled recipes: complete, published, and each with a small form that is possible and can be built."""

from itertools import accumulate

import pytest
import yaml

from encoder_core.families import albert, electra, modernbert, xlnet
from encoder_core.families.catalogue import ModelConfig
from launcher.runtime.recipe.identity import field_kind, flatten
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.network import meta_module
from launcher.runtime.recipe.phases import recipe_in_phase, source_shares, source_temperature
from launcher.runtime.recipe.schema import PLACEHOLDER, Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.summary import discriminator_parameter_count, model_title, parameter_count, tokens_per_step
from launcher.runtime.recipe.timeline import tokens_before
from launcher.runtime.recipe.tiny import tiny
from tests.support.models import official

# The released files say nothing of the dropout that they were trained with.
TRAINED_BASE, TRAINED_LARGE = (
    size.model_copy(update={"attention_output_dropout": 0.1})
    for size in (official.MODERNBERT_BASE, official.MODERNBERT_LARGE)
)
MOSAIC_LIKE = official.BERT_BASE.model_copy(update={"vocab": 30_528, "attention_dropout": 0.0})


def like_modernbert(layers: int, hidden: int, feed_forward: int, vocab: int) -> modernbert.ModernBertConfig:
    """Ettin and mmBERT: ModernBERTs of other sizes, whose local layers have the base of the global ones at the end."""
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // 64,
        "feed_forward": feed_forward,
        "vocab": vocab,
    }
    return TRAINED_BASE.model_copy(update={**sizes, "local_rope_base": 160_000.0})


CHINESE_BASE = official.BERT_BASE.model_copy(update={"vocab": 21_128})

PUBLISHED: dict[str, tuple[ModelConfig, int, tuple[float, float]]] = {
    # name: the family's official size, parameters of all networks, published millions from and to (the
    # discriminator's, where there are two networks)
    "bert-tiny": (official.BERT_TINY, 4_433_468, (4.4, 4.5)),
    "bert-mini": (official.BERT_MINI, 11_267_900, (11.2, 11.4)),
    "bert-small": (official.BERT_SMALL, 29_058_876, (28.8, 29.4)),
    "bert-medium": (official.BERT_MEDIUM, 41_668_412, (41.4, 42)),
    "bert-base": (official.BERT_BASE, 110_106_428, (110, 111)),
    "bert-large": (official.BERT_LARGE, 336_226_108, (336, 340)),
    "roberta-base": (official.ROBERTA_BASE, 124_696_665, (120, 125)),
    "roberta-large": (official.ROBERTA_LARGE, 355_411_033, (350, 356)),
    "roberta-large-160gb": (official.ROBERTA_LARGE, 355_411_033, (350, 356)),
    "albert-base": (official.ALBERT_BASE, 11_813_810, (11.7, 12)),
    "albert-large": (official.ALBERT_LARGE, 17_847_474, (17.7, 18)),
    "albert-xlarge": (official.ALBERT_XLARGE, 59_021_490, (58.7, 60)),
    "albert-xxlarge": (official.ALBERT_XXLARGE, 223_158_450, (220, 235)),
    "distilbert-base": (official.DISTILBERT_BASE, 66_985_530, (66, 67)),
    "spanbert-base": (official.SPANBERT_BASE, 110_300_480, (110, 111)),
    "spanbert-large": (official.SPANBERT_LARGE, 336_998_976, (336, 340)),
    "xlnet-base": (official.XLNET_BASE, 116_750_336, (110, 117)),
    "xlnet-large": (official.XLNET_LARGE, 360_300_800, (340, 361)),
    "electra-small": (official.ELECTRA_SMALL, 14_196_219, (13.5, 14)),
    "electra-base": (official.ELECTRA_BASE, 119_386_427, (109, 110)),
    "electra-large": (official.ELECTRA_LARGE, 354_655_291, (334, 336)),
    "deberta-base": (official.DEBERTA_BASE, 139_637_337, (139, 140)),
    "deberta-base-sop": (official.DEBERTA_BASE, 140_229_467, (139, 141)),
    "deberta-large": (official.DEBERTA_LARGE, 406_789_209, (400, 407)),
    "deberta-xlarge": (official.DEBERTA_XLARGE, 759_430_233, (750, 760)),
    "deberta-v2-xlarge": (official.DEBERTA_V2_XLARGE, 887_871_588, (880, 900)),
    "deberta-v2-xxlarge": (official.DEBERTA_V2_XXLARGE, 1_567_828_068, (1500, 1570)),
    "deberta-v3-xsmall": (
        official.DEBERTA_V3_XSMALL,
        131_339_749,
        (22 + 48, 71),
    ),  # backbone and embeddings, apart
    "deberta-v3-small": (official.DEBERTA_V3_SMALL, 263_051_365, (44 + 97, 44 + 98)),
    "deberta-v3-base": (official.DEBERTA_V3_BASE, 326_842_213, (86 + 98, 185)),
    "deberta-v3-large": (official.DEBERTA_V3_LARGE, 719_626_341, (304 + 131, 436)),
    "modernbert-base": (TRAINED_BASE, 149_655_232, (149, 150)),
    "roberta-wwm-ext-zh": (CHINESE_BASE, 102_290_312, (102, 103)),
    "macbert-base-zh": (CHINESE_BASE, 102_882_442, (102, 103)),
    "ernie-base-zh": (CHINESE_BASE, 102_882_442, (102, 104)),
    "modernbert-large": (TRAINED_LARGE, 395_881_664, (395, 396)),
    "eurobert-210m": (
        official.EUROBERT_210M,
        310_266_624,
        (210 + 98, 311),
    ),  # with the decoder, which they do not count
    "neobert-base": (official.NEOBERT_BASE, 245_136_954, (240, 250)),
    "xlm-mlm-tlm-base": (official.XLM_BASE, 249_071_384, (248, 250)),
    "ettin-17m": (like_modernbert(7, 256, 384, 50_368), 16_913_600, (16, 18)),
    "ettin-32m": (like_modernbert(10, 384, 576, 50_368), 32_081_344, (31, 33)),
    "ettin-68m": (like_modernbert(19, 512, 768, 50_368), 68_457_664, (67, 69)),
    "ettin-150m": (like_modernbert(22, 768, 1152, 50_368), 149_655_232, (149, 151)),
    "ettin-400m": (like_modernbert(28, 1024, 2624, 50_368), 395_881_664, (394, 401)),
    "ettin-1b": (like_modernbert(28, 1792, 3840, 50_368), 1_031_314_112, (1000, 1040)),
    "mmbert-small": (like_modernbert(22, 384, 1152, 256_000), 140_897_536, (140, 141)),
    "mmbert-base": (like_modernbert(22, 768, 1152, 256_000), 307_786_240, (306, 308)),
    "chinese-modernbert-base": (
        TRAINED_BASE.model_copy(update={"vocab": 32_000}),
        135_530_240,
        (134, 137),
    ),  # ours
    "bart-base": (official.BART_BASE, 139_420_416, (139, 140)),
    "bart-large": (official.BART_LARGE, 406_291_456, (400, 407)),
    "mosaicbert-like": (MOSAIC_LIKE, 109_518_912, (109, 111)),  # its own has gated blocks: 137
}

CONTRASTIVE = {
    "simcse-base": official.BERT_BASE,
    "contrastive-base": official.BERT_BASE,
}  # which start from a published model

IMPLIED = {
    # what the tokenizer, a tag or an absent part of the objective decides
    *("model.pad_id", "objective.mlm.kind", "objective.plm.kind", "objective.denoise.kind"),
    *("schedule.power", "schedule.floor"),
    *("objective.mlm.longest", "objective.mlm.span_p", "schedule.decay_steps", "schedule.restarts"),
    *("mixing", "mixing.batches", "mixing.temperature", "similar_words"),
}


def written_keys(data: object, prefix: str = "") -> set[str]:
    if not isinstance(data, dict):
        return set()
    return {f"{prefix}{key}" for key in data} | {
        path for key, value in data.items() for path in written_keys(value, f"{prefix}{key}.")
    }


def test_every_official_size_has_a_recipe() -> None:
    assert set(bundled()) == {"quickstart", *CONTRASTIVE, *PUBLISHED}


@pytest.mark.parametrize("name", bundled())
def test_a_bundled_recipe_is_complete_and_reads_back_as_itself(name: str) -> None:
    text, recipe = bundled()[name], load(name)
    assert recipe.name == name
    assert parse_recipe(recipe.to_yaml(), "again") == recipe
    assert parse_recipe(text, name, is_bundled=True) == recipe, "libyaml reads it as PyYAML does"
    assert written_keys(recipe.to_data()) - written_keys(yaml.safe_load(text)) <= IMPLIED
    assert {field_kind(path) for path in flatten(recipe.to_data())} == {"identity", "operational"}
    lines = text.splitlines()
    assert max(map(len, lines)) <= 125
    assert len(lines) < 100, "it fits a screen"
    assert name == "quickstart" or any("et al." in line for line in lines[:6]), "and says where it is from"


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("name", PUBLISHED)
def test_its_model_is_the_official_size(name: str) -> None:
    recipe = load(name)
    official, count, (low, high) = PUBLISHED[name]
    assert recipe.model == official
    assert parameter_count(recipe) == count
    assert low <= (discriminator_parameter_count(recipe) or count) / 1e6 <= high


@pytest.mark.parametrize(
    ("name", "lr", "warmup", "steps", "tokens"),
    [
        ("roberta-base", 6e-4, 24_000, 500_000, 8192 * 512),  # Liu et al. 2019, table 9, as released
        ("roberta-large", 4e-4, 30_000, 100_000, 8192 * 512),
        ("roberta-large-160gb", 4e-4, 30_000, 500_000, 8192 * 512),
        (
            "roberta-wwm-ext-zh",
            1e-4,
            100_000,
            1_000_000,
            384 * 512,
        ),  # ymcui/Chinese-BERT-wwm, but for lr and warmup
        ("macbert-base-zh", 1e-4, 10_000, 1_000_000, 2560 * 512),  # Cui et al. 2020
        ("distilbert-base", 5e-4, 305, 6100, 4096 * 512),  # Sanh et al. 2019, section 3; the steps are ours
        (
            "bart-large",
            4e-4,
            30_000,
            500_000,
            8000 * 512,
        ),  # Lewis et al. 2019, section 5.1, but for lr and warmup
        ("deberta-large", 2e-4, 10_000, 1_000_000, 2048 * 512),  # He et al. 2021, appendix A
        ("deberta-v2-xxlarge", 1.5e-4, 10_000, 1_000_000, 2048 * 512),
        ("deberta-v3-base", 6e-4, 10_000, 500_000, 8192 * 512),  # He et al. 2023, appendix
        ("deberta-v3-large", 3e-4, 10_000, 500_000, 8192 * 512),
    ],
)
def test_its_training_is_the_published_one(name: str, lr: float, warmup: int, steps: int, tokens: int) -> None:
    """Where no public configuration says all of it (test_public_configurations.py)."""
    recipe = load(name)
    assert recipe.optimizer.settings.lr == lr
    assert (recipe.schedule.warmup, recipe.schedule.decay, recipe.total_steps) == (warmup, "linear", steps)
    assert tokens_per_step(recipe.phases[0]) == tokens


@pytest.mark.parametrize(
    ("name", "warmup", "rise", "ends"),
    [  # Warner et al. 2024, section 2.2 and appendix A
        ("modernbert-base", 3e9, 50e9, [1719e9, 1969e9, 2019e9]),
        ("modernbert-large", 2e9, 10e9, [900e9, 1719e9, 1969e9, 2019e9]),
        # Weller et al. 2025 and Marone et al. 2025, their configurations
        ("ettin-17m", 4e9, 125e9, [1.7e12, 1.95e12, 2e12]),
        ("ettin-32m", 4e9, 100e9, [1.7e12, 1.95e12, 2e12]),
        ("ettin-68m", 3e9, 75e9, [1.7e12, 1.95e12, 2e12]),
        ("ettin-150m", 3e9, 50e9, [1.7e12, 1.95e12, 2e12]),
        ("ettin-400m", 2e9, 10e9, [1.7e12, 1.95e12, 2e12]),
        ("ettin-1b", 2e9, 3e9, [1.7e12 / 3, 1.95e12 / 3, 2e12 / 3]),
        ("mmbert-small", 4e9, 100e9, [2.3e12, 2.9e12, 3e12]),
        ("mmbert-base", 3e9, 60e9, [2.3e12, 2.9e12, 3e12]),
    ],
)
def test_phases_of_modernbert_and_its_successors_have_the_published_tokens(
    name: str, warmup: float, rise: float, ends: list[float]
) -> None:
    recipe = load(name)
    steps = list(accumulate(phase.steps for phase in recipe.phases))
    assert [tokens_before(recipe, step) for step in steps] == pytest.approx(ends, rel=1e-4)
    assert [phase.length for phase in recipe.phases][-2:] == [8192, 8192]
    assert tokens_before(recipe, recipe.schedule.warmup) == pytest.approx(warmup, rel=1e-2)
    rising = recipe.phases[0].batch.warmup
    assert rising is not None
    assert tokens_before(recipe, rising.steps) == pytest.approx(rise, rel=5e-3)


def test_mmberts_masks_and_languages_anneal() -> None:
    for name in ("mmbert-small", "mmbert-base"):
        recipe = load(name)
        masks = [recipe_in_phase(recipe, phase).objective.mlm for phase in recipe.phases]
        assert [mlm.rate for mlm in masks if mlm is not None] == [0.3, 0.15, 0.05]
        assert [1 / source_temperature(recipe, phase) for phase in recipe.phases] == pytest.approx([0.7, 0.5, 0.3])
        entered = [
            {source for source, share in (source_shares(recipe, phase) or {}).items() if share != 0}
            for phase in recipe.phases
        ]
        assert entered[0] < entered[1] < entered[2] == recipe.corpus.sources.keys()


def test_albert_xxlarge_has_the_papers_parameters_but_for_the_pooler() -> None:
    module = meta_module(load("albert-xxlarge").model, load("albert-xxlarge").objective)
    pooler = sum(p.numel() for name, p in module.named_parameters() if "pooler" in name)
    assert pooler == 4096 * 4096 + 4096
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == 223
    assert round((sum(p.numel() for p in module.parameters()) - pooler) / 1e6) == 206


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("name", bundled())
def test_its_small_form_is_the_same_kind_of_run(name: str) -> None:
    recipe, small = load(name), tiny(load(name))
    assert parse_recipe(small.to_yaml(), "again") == small
    assert structure(small) == structure(recipe)
    assert [phase.batch.sequences is None for phase in small.phases] == [
        phase.batch.sequences is None for phase in recipe.phases
    ]
    assert shares(small) == pytest.approx(shares(recipe), abs=1e-3)
    with_vocabulary = small.model.model_copy(update={"vocab": 500})
    module = meta_module(with_vocabulary, small.objective)
    assert type(module) is type(meta_module(recipe.model.model_copy(update={"vocab": 500}), recipe.objective))
    assert sum(p.numel() for p in module.parameters()) < 1_500_000
    assert sum(phase.steps * tokens_per_step(phase) for phase in small.phases) < 10_000_000


def structure(recipe: Recipe) -> tuple[object, ...]:
    """What a small form keeps."""
    objective = recipe.objective.model_dump(exclude={"plm": {"predict", "permutation"}, "distil": {"teachers"}})
    optimizer = recipe.optimizer.model_dump(exclude={name: {"lr"} for name in type(recipe.optimizer).model_fields})
    start = "scratch" if recipe.start.startswith(PLACEHOLDER) else recipe.start
    reading = recipe.input.model_dump(exclude={"copies", "reuse"})
    return (
        *(
            model_title(recipe),
            objective,
            optimizer,
            reading,
            recipe.schedule.decay,
            recipe.zero,
            recipe.corpus,
        ),
        *(recipe.tokenizer, recipe.seed, start, recipe.model.activation, recipe.model.layer_norm_eps),
    )


def shares(recipe: Recipe) -> list[float]:
    """Each phase's part of the steps."""
    return [phase.steps / recipe.total_steps for phase in recipe.phases]


def test_a_small_factorised_embedding_stays_narrower_than_the_layers() -> None:
    for name in ("albert-base", "electra-small"):
        model = tiny(load(name)).model
        assert isinstance(model, albert.AlbertConfig | electra.ElectraConfig)
        assert model.embedding < model.hidden
    assert isinstance(model := tiny(load("electra-base")).model, electra.ElectraConfig)
    assert model.embedding == model.hidden
    assert model.generator.hidden < model.hidden


def test_small_lanes_fit_together() -> None:
    """A row is half reused, memory reaches back as far as three quarters of a row, one token in six is predicted."""
    small = tiny(load("xlnet-large"))
    assert isinstance(small.model, xlnet.XlnetConfig)
    (phase,) = small.phases
    assert (small.model.reuse, small.model.memory) == (phase.length // 2, 3 * phase.length // 4)
    assert small.objective.plm is not None
    assert small.objective.plm.predict == phase.length // 6
