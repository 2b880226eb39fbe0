"""`model.mup` in a recipe: what it makes of weights and rates, where it is refused, and what it leaves as it was."""

import pytest
import torch

from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.optim.updates import set_update
from launcher.errors import RecipeError
from launcher.runtime.rank.build import build_model, build_optimizer
from launcher.runtime.recipe.identity import diff_lines, identity_fields
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import summary_lines
from launcher.runtime.recipe.tiny import tiny
from tests.support.models.exports import fitting_tokenizer

BASE = 192
ADAMW, MUON = "optimizer={adamw: {lr: 1.0e-3}}", "optimizer={muon: {lr: 1.0e-3}}"
SMALL = ("model.hidden=64", "model.heads=4", "model.feed_forward=128", "model.layers=2", "model.vocab=null")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fitting_tokenizer("wordpiece", "bert")


def at(width: int | None, *settings: str) -> Recipe:
    """A small BERT, tuned at a width."""
    mup = () if width is None else (f"model.mup={{hidden: {width}}}",)
    return load("bert-base", (*SMALL, ADAMW, *settings, *mup))


def rates(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, float]:
    """The rate of each parameter when the schedule's is 1."""
    model = build_model(recipe, tokenizer)
    optimizer = build_optimizer(recipe, model)
    set_update(optimizer, lr=1.0, count=1)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.long
def test_fresh_weights_and_rates_follow_the_base(tokenizer: Tokenizer) -> None:
    plain, scaled = (dict(build_model(at(base), tokenizer).named_parameters()) for base in (None, 16))
    query, norm = "encoder.layers.1.attention.query.weight", "head.norm.weight"
    assert torch.allclose(scaled[query], plain[query] / 2)
    assert torch.equal(scaled[norm], plain[norm] / 4)
    word = "encoder.embeddings.word.weight"
    assert torch.equal(scaled[word], plain[word])
    adamw, muon = rates(at(16), tokenizer), rates(at(16, MUON), tokenizer)
    assert (adamw[query], adamw[norm], adamw[word]) == (1 / 4, 1 / 4, 1.0)
    assert [muon[name] for name in (query, norm, word)] == pytest.approx([1 / 2, 1 / 4, 1.0])
    assert muon["head.dense.weight"] == 1 / 4  # AdamW's, as of all heads


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
def test_at_the_width_of_the_base_a_run_is_what_it_would_be_without(tokenizer: Tokenizer, optimizer: str) -> None:
    """Bit for bit after some steps, in the same groups."""
    ends = []
    for base in (None, 64):
        recipe = at(base, optimizer)
        model = build_model(recipe, tokenizer)
        built = build_optimizer(recipe, model)
        draws = torch.Generator().manual_seed(1)
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draws)
            set_update(built, lr=1e-2, count=step + 1)
            built.step()
        ends.append([p.detach() for p in model.parameters()])
        ends.append([torch.tensor([len(group["params"])]) for group in built.param_groups])
    for without, with_base in ((ends[0], ends[2]), (ends[1], ends[3])):
        assert all(torch.equal(a, b) for a, b in zip(without, with_base, strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "place"),
    [
        ("bert-base", ("model.mup={hidden: 100}",), "model.mup"),
        ("modernbert-base", ("model.mup={hidden: 64}", "model.feed_forward=1150"), "model.mup"),
        ("albert-base", ("model.mup={hidden: 192}",), "optimizer.lamb"),
        ("xlm-mlm-tlm-base", ("model.mup={hidden: 128}",), "model.mup"),
        ("xlnet-base", ("model.mup={hidden: 192}",), "model.mup"),
        ("bert-base", ("model.mup={hidden: 0}",), "model.mup.hidden"),
        ("bert-base", ("model.mup={width: 64}",), "model.mup.width"),
    ],
)
def test_what_mup_cannot_scale_is_refused_at_its_place(name: str, settings: tuple[str, ...], place: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(name, settings)
    assert place in str(caught.value)


def test_a_recipe_without_it_is_the_recipe_that_it_was() -> None:
    assert "mup" not in load("bert-base").model.model_dump()
    assert not any(path.startswith("model.mup") for path in identity_fields(load("eurobert-210m")))


@pytest.mark.long
def test_the_base_is_identity_and_stays_written() -> None:
    plain, based = load("bert-base"), load("bert-base", (f"model.mup={{hidden: {BASE}}}",))
    assert parse_recipe(based.to_yaml(), "again") == based
    (line, other) = diff_lines(identity_fields(plain), identity_fields(based))
    assert "model.mup.feed_forward" in line
    assert f"model.mup.hidden: (absent) -> {BASE}" in other
    assert str(BASE) in summary_lines(based)[0]
    assert summary_lines(plain)[0] in summary_lines(based)[0]


@pytest.mark.parametrize("name", ["bert-base", "electra-base", "modernbert-base"])
def test_the_small_form_is_its_own_base(name: str) -> None:
    """Its rates are for its own width."""
    recipe = load(name, (f"model.mup={{hidden: {BASE}}}",))
    small, plain = tiny(recipe), tiny(load(name))
    assert small.model.mup is not None
    assert small.model.mup.hidden == small.model.hidden
    assert small.model.model_copy(update={"mup": None}) == plain.model
