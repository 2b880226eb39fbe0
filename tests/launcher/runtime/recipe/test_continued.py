"""The recipe that continues a model: complete, accepted, and fitting the model without an edit."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModel
from typer.testing import CliRunner

from data_service.tokenizers.load import load_tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.terms.replaced import ReplacedTokenConfig
from encoder_core.terms.sentence_pairs import NspConfig
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.runtime.cluster.resources import plan_resources
from launcher.runtime.rank.initial_weights import check_start
from launcher.runtime.recipe.checks import unsuitable
from launcher.runtime.recipe.continued import TOKENIZER, commented, continued
from launcher.runtime.recipe.load import load, loads, reload
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads
from tests.support.models.exports import FAMILIES, LENGTH, Family, export
from tests.support.runs.starts import BERT, MLM, Setting
from tests.support.runs.starts import export as export_for


@pytest.mark.parametrize("name", FAMILIES)
def test_every_export_is_continued_without_an_edit(tmp_path: Path, name: str) -> None:
    family, folder = FAMILIES[name], tmp_path / "my model"
    export(family, folder)
    recipe = continued(str(folder))
    assert loads(commented(recipe), "printed") == recipe
    assert recipe.start == str(folder)
    assert unsuitable(recipe, load_tokenizer(recipe.tokenizer.uri)) == []
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
    recipe = continued(str(tmp_path))
    assert isinstance(recipe.model, RobertaConfig)
    assert (recipe.model.layers, recipe.model.generator_layers) == (3, 2)
    assert list(recipe.objective.terms) == ["mlm", "rtd"]
    check_start(recipe)


def test_a_model_without_heads_gets_no_pair_task(setting: Setting, tmp_path: Path) -> None:
    export_for(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"), tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "bare")
    recipe = continued(str(tmp_path / "bare"))
    assert (recipe.objective.nsp, recipe.input.packing) == (None, "full_sentences")
    assert recipe.tokenizer.uri == TOKENIZER
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
    with pytest.raises(RunError, match=r"\bELECTRA's\b.*\n.*generator/"):
        continued(str(tmp_path / "discriminator"))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json\b"):
        continued(str(tmp_path))


def test_settings_may_still_be_set(tmp_path: Path) -> None:
    export(FAMILIES["bert"], tmp_path / "m")
    recipe = reload(continued(str(tmp_path / "m")), ("phases.0.steps=2000", "schedule.warmup=200"))
    assert recipe.total_steps == 2000
