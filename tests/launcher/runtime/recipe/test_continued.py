"""The recipe that continues a model: complete, accepted, and fitting the model without an edit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModel
from typer.testing import CliRunner

from checkpoints.hf.folder import WEIGHTS
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import NspConfig
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.runtime.cluster.resources import plan_resources
from launcher.runtime.rank.initial_weights import check_start
from launcher.runtime.recipe.checks import tokenizer_issues
from launcher.runtime.recipe.continued import TOKENIZER_PLACEHOLDER, commented_yaml, continued_recipe
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads
from tests.support.models.exports import FAMILIES, LENGTH, Family, export, fitting_tokenizer
from tests.support.models.published import described, pickle_weights, publish
from tests.support.runs.starts import BERT, MLM, Setting
from tests.support.runs.starts import export as export_for


@pytest.mark.parametrize("name", FAMILIES)
def test_every_export_is_continued_without_an_edit(tmp_path: Path, name: str) -> None:
    family, folder = FAMILIES[name], tmp_path / "my model"
    export(family, folder)
    recipe = continued_recipe(str(folder))
    assert parse_recipe(commented_yaml(recipe), "printed") == recipe
    assert recipe.start == str(folder)
    assert tokenizer_issues(recipe, load_tokenizer(recipe.tokenizer.uri)) == []
    check_start(recipe)
    assert recipe.phases[0].length == LENGTH
    assert plan_resources(recipe).object_store_bytes < 3 << 30  # of the memory of a small machine
    theirs = exported_heads(family.config, family.objective)
    assert exported_heads(recipe.model, recipe.objective) == theirs
    assert (recipe.objective.rtd is not None) == (len(family.folders) == 2)


def test_a_pair_of_any_family_is_continued(tmp_path: Path) -> None:
    objective = RecipeObjective(mlm=MLM, nsp=NspConfig(), rtd=ReplacedTokenConfig())
    roberta = FAMILIES["roberta"]
    config = roberta.config.model_copy(update={"layers": 3, "generator_layers": 2})
    export(Family(config, objective, roberta.kind, roberta.style, ("generator", "discriminator")), tmp_path)
    recipe = continued_recipe(str(tmp_path))
    assert isinstance(recipe.model, RobertaConfig)
    assert (recipe.model.layers, recipe.model.generator_layers) == (3, 2)
    assert list(recipe.objective.terms) == ["mlm", "rtd"]
    check_start(recipe)


def published(folder: Path, *, heads: bool = True, **own: object) -> DebertaV2Config:
    """A folder as DeBERTa v3 is published: its tokenizer, and a config.json that version 2 could have."""
    tokenizer = fitting_tokenizer("unigram", "deberta")
    known = FAMILIES["deberta-v2"].config.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    assert isinstance(known, DebertaV2Config)
    config = known.model_copy(update=own)
    publish(config, folder, heads=heads)
    for name, content in tokenizer.save_files().items():
        (folder / name).write_bytes(content)
    return config


@pytest.mark.parametrize("layers", [2, 5])
def test_deberta_v3_as_published_is_continued_as_a_discriminator(tmp_path: Path, layers: int) -> None:
    config = published(tmp_path / "v3", layers=layers)
    recipe = continued_recipe(str(tmp_path / "v3"))
    assert parse_recipe(commented_yaml(recipe), "printed") == recipe
    bundled = load("deberta-v3-base")
    assert (recipe.objective, recipe.input) == (bundled.objective, bundled.input)
    assert isinstance(recipe.model, DebertaV2Config)
    assert recipe.model.generator.layers == layers // 2
    assert recipe.model.hidden == config.hidden
    assert tokenizer_issues(recipe, load_tokenizer(recipe.tokenizer.uri)) == []
    check_start(recipe)


def test_the_generator_beside_it_says_how_deep_it_is(tmp_path: Path) -> None:
    config = published(tmp_path / "v3", layers=5, heads=False)
    own = described(config) | {"num_hidden_layers": 4}
    (tmp_path / "v3/generator_config.json").write_text(json.dumps(own))
    (tmp_path / "v3/pytorch_model.generator.bin").touch()
    recipe = continued_recipe(str(tmp_path / "v3"))
    assert list(recipe.objective.terms) == ["mlm", "rtd"]
    assert isinstance(recipe.model, DebertaV2Config)
    assert (recipe.model.layers, recipe.model.generator_layers) == (5, 4)


@pytest.mark.parametrize(("zipped", "shards"), [(True, 1), (False, 1), (True, 3)])
@pytest.mark.parametrize("heads", [True, False])
def test_pickled_weights_are_told_by_their_names(tmp_path: Path, zipped: bool, shards: int, heads: bool) -> None:
    published(tmp_path / "model", heads=heads)
    pickle_weights(tmp_path / "model", zipped=zipped, shards=shards)
    assert (continued_recipe(str(tmp_path / "model")).objective.rtd is not None) == heads


@pytest.mark.parametrize("convolution", [None, 3])
def test_a_deberta_without_that_head_is_a_version_2(tmp_path: Path, convolution: int | None) -> None:
    """With a note where a version 3 whose heads were left out would look the same."""
    published(tmp_path / "v2", heads=False, convolution=convolution)
    recipe = continued_recipe(str(tmp_path / "v2"))
    assert list(recipe.objective.terms) == ["mlm"]
    assert ("deberta-v3-base" in commented_yaml(recipe)) == (convolution is None)


@pytest.mark.long
def test_a_config_without_weights_is_no_discriminator(tmp_path: Path) -> None:
    published(tmp_path / "bare")
    (tmp_path / "bare" / WEIGHTS).unlink()
    assert continued_recipe(str(tmp_path / "bare")).objective.rtd is None


@pytest.mark.parametrize("name", ["roberta", "deberta", "deberta-v2", "modernbert"])
def test_the_discriminator_of_any_export_is_continued_as_one(tmp_path: Path, name: str) -> None:
    family, objective = FAMILIES[name], RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig())
    pair = ("generator", "discriminator")
    export(Family(family.config, objective, family.kind, family.style, pair), tmp_path)
    recipe = continued_recipe(str(tmp_path / "discriminator"))
    assert list(recipe.objective.terms) == ["mlm", "rtd"]
    check_start(recipe)
    assert list(continued_recipe(str(tmp_path / "generator")).objective.terms) == ["mlm"]


def test_a_model_without_heads_gets_no_pair_task(setting: Setting, tmp_path: Path) -> None:
    export_for(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"), tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "bare")
    recipe = continued_recipe(str(tmp_path / "bare"))
    assert (recipe.objective.nsp, recipe.input.packing) == (None, "full_sentences")
    assert recipe.tokenizer.uri == TOKENIZER_PLACEHOLDER
    inputs = {"corpus": setting.run.recipe.corpus, "tokenizer": setting.run.recipe.tokenizer}
    asked = replace(setting, run=replace(setting.run, recipe=recipe.model_copy(update=inputs)))
    fresh = asked.begin()[1].record["fresh"]
    assert fresh == [
        "head.dense.weight",
        "head.dense.bias",
        "head.norm.weight",
        "head.norm.bias",
        "head.decoder.bias",
    ]


def test_the_command_prints_what_recipe_check_accepts(tmp_path: Path) -> None:
    export(FAMILIES["roberta"], tmp_path / "model")
    printed = CliRunner().invoke(app, ["recipe", "from", str(tmp_path / "model")], catch_exceptions=False)
    mine = tmp_path / "mine.yaml"
    mine.write_text(printed.output)
    assert load(str(mine)).name == "continued-model"
    checked = CliRunner().invoke(app, ["recipe", "check", str(mine)], catch_exceptions=False)
    assert checked.output.startswith("continued-model: RoBERTa")


def test_one_network_of_electras_two_is_refused(tmp_path: Path) -> None:
    export(FAMILIES["electra"], tmp_path)
    with pytest.raises(RunError, match=r"\bELECTRA\b.*\n.*generator/"):
        continued_recipe(str(tmp_path / "discriminator"))
