"""The bundled recipes against their families' official code: what is drawn, decayed, masked, and how far they scale."""

import pytest
from torch import nn

from encoder_core.layers.initialise import initialise
from encoder_core.layers.parameters import AttentionBias, ScaledLinear
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.optim.groups import parameter_groups
from launcher.plan.estimate.estimate import estimate_recipe
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.capacity.workload import targets_per_row
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny

# by the text: fifty recipes take two seconds to load, at each collection
PUBLISHED = sorted(name for name, text in bundled().items() if name != "quickstart" and "\n  contrastive:" not in text)
ROBERTA = ("roberta-base", "roberta-large")  # Chinese RoBERTa-wwm-ext is BERT's code
NORMAL = (*ROBERTA, "spanbert", "xlnet", "deberta", "distilbert", "eurobert", "xlm", "bart")
MODERN = ("modernbert", "ettin", "mmbert", "chinese-modernbert")
OUTPUTS = ("output.weight", "down.weight", "dense.weight")  # Megatron's, ModernBERT's too
LARGE = 4000  # elements: enough to tell 0.88 of a deviation from all of it


def fresh(recipe: Recipe) -> ObjectiveModule:
    """The model of a recipe's small form, with the recipe's own fresh weights."""
    config = tiny(recipe).model.with_tokenizer(500, recipe.model.pad_id)
    model = objective_module(config, tiny(recipe).objective)
    initialise(model, recipe.model.initializer_range, recipe.model.initializer)
    return model


@pytest.mark.default_cases(12)
@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_drawn_as_in_the_official_code(name: str) -> None:
    model, std = fresh(load(name)), 0.02 if name.startswith(NORMAL) else 0.0176
    drawn = [(path, p) for path, p in model.named_parameters() if p.ndim > 1 and p.numel() > LARGE and p.any()]
    assert drawn
    for path, p in drawn:
        module = model.get_submodule(path.rpartition(".")[0])
        scale = module.scale if isinstance(module, ScaledLinear) else 1.0
        assert (scale < 1) == (name.startswith(MODERN) and path.endswith(OUTPUTS)), path
        assert p.std().item() == pytest.approx(std * scale, rel=0.06), path
        assert (p.abs().max() > 0.0401) == name.startswith(NORMAL), path


def test_xlnet_draws_the_biases_of_attention() -> None:
    biases = [module.bias for module in fresh(load("xlnet-base")).modules() if isinstance(module, AttentionBias)]
    assert len(biases) == 6
    assert nn.utils.parameters_to_vector(biases).std().item() == pytest.approx(0.02, rel=0.1)


def test_robertas_row_of_padding_is_zero() -> None:
    model = fresh(load("roberta-base"))
    padding = load("roberta-base").model.pad_id
    words, positions = (dict(model.named_parameters())[f"encoder.embeddings.{table}.weight"]
                        for table in ("word", "position"))  # fmt: skip
    for table in (words, positions):
        assert not table[padding].any()
        assert table[padding + 1].any()


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("name", PUBLISHED)
def test_weight_decay_acts_on_the_official_parameters(name: str) -> None:
    model, settings = fresh(load(name)), load(name).optimizer.settings
    groups = parameter_groups(
        model, settings.weight_decay, decayed=settings.decayed, update_groups=model.update_groups()
    )
    decaying = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    attention = {id(m.bias) for m in model.modules() if isinstance(m, AttentionBias)}
    for path, p in model.named_parameters():
        plain = path.endswith("bias") or "norm" in path
        expected = not plain or name.startswith((*ROBERTA, "spanbert", "bart", "neobert")) or id(p) in attention
        assert (id(p) in decaying) == (expected and settings.weight_decay > 0), path


@pytest.mark.parametrize(
    ("name", "length", "targets"),
    [
        ("bert-base", 128, 19),  # round(0.15 x 128)
        ("bert-base", 512, 77),
        ("albert-base", 512, 77),
        ("electra-base", 512, 77),
        ("electra-large", 512, 128),
        ("deberta-base", 512, 77),
        ("deberta-v3-base", 512, 77),
        ("macbert-base-zh", 512, 77),
        ("roberta-base", 512, 76),  # fairseq's 76.8 may be <s> and </s>: 76.5 words
        ("spanbert-base", 512, 77),  # ceil(0.15 x 510)
    ],
)
def test_a_row_has_the_official_number_of_targets(name: str, length: int, targets: int) -> None:
    assert targets_per_row(load(name), length) == targets


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_64_ranks_share_every_batch_evenly(name: str) -> None:
    """Of ModernBERT-large's published batch of long rows, 616, no more than 8 ranks."""
    recipe, nodes = load(name), 1 if name == "modernbert-large" else 8
    for phase in recipe.phases:
        assert phase.batch.sequences is not None
        assert recipe.microbatch != "auto"
        microbatches, rest = divmod(phase.batch.sequences, recipe.microbatch)
        assert (rest, microbatches % (8 * nodes)) == (0, 0)
    for took in estimate_recipe(recipe, Cluster(nodes, 8, find_gpu("H100"), mtbf=1e8), None).phases:
        assert took.microbatches == took.rounds * 8 * nodes  # nobody idles
