"""Pickled weights of a start become safetensors of the run, once, at `init`; what is refused leaves no run."""

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.objectives.replaced import ReplacedTokenConfig
from launcher.runtime.rank.kept_start import keep_start
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.run.create import create_run
from tests.support.models.parity import assert_close, parameters_of
from tests.support.models.published import gather_pair, pickle_weights
from tests.support.runs.starts import BERT, DEBERTA_V2, ELECTRA, MLM, Setting, export
from tests.support.stores.s3 import S3Server


@pytest.mark.long
def test_the_run_keeps_safetensors(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path / "published")
    exported = parameters_of(export(asked, tmp_path / "published"))
    pickle_weights(tmp_path / "published")
    recipe = keep_start(asked.run.recipe, str(tmp_path / "new"))
    copy = tmp_path / "new/start/published"
    assert recipe.start == str(copy)
    assert not (copy / "pytorch_model.bin").exists()
    assert (copy / "tokenizer.json").exists()
    run = create_run(recipe, str(tmp_path / "new"), datetime.now(UTC))
    model, start = setting.asks(BERT, run.recipe.objective, run.recipe.start).begin()
    assert start.record["fresh"] == []
    assert all(torch.equal(p, exported[name]) for name, p in parameters_of(model).items())


@pytest.mark.long
def test_a_pair_in_a_bucket_one_of_them_pickled(setting: Setting, s3: S3Server, tmp_path: Path) -> None:
    uri = f"s3://{s3.new_bucket()}/pair"
    asked = setting.asks(ELECTRA, RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()), uri)
    export(asked, tmp_path / "pair")
    pickle_weights(tmp_path / "pair/generator")
    for path in (path for path in (tmp_path / "pair").rglob("*") if path.is_file()):
        open_store(uri).put_file(path.relative_to(tmp_path / "pair").as_posix(), path)
    recipe = keep_start(asked.run.recipe, str(tmp_path / "new"))
    _, start = setting.asks(ELECTRA, asked.run.recipe.objective, recipe.start).begin()
    assert start.record["fresh"] == []


@pytest.mark.long
@pytest.mark.parametrize("case", range(3))
def test_a_generator_beside_its_discriminator(setting: Setting, tmp_path: Path, case: int) -> None:
    """Both networks of a pair are read from one folder, as DeBERTa v3's are published; one network alone, too."""
    draw = random.Random(f"beside {case}")
    config = DEBERTA_V2.model_copy(
        update={"layers": draw.randint(2, 4), "generator_layers": draw.randint(1, 5), "convolution": None}
    )
    objective = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings="gradient_disentangled"))
    asked = setting.asks(config, objective, tmp_path / "v3")
    exported = parameters_of(export(asked, tmp_path / "pair"))
    gather_pair(tmp_path / "pair", tmp_path / "v3", pickled=case > 0)
    recipe = keep_start(asked.run.recipe, str(tmp_path / "new"))
    assert recipe.start == str(tmp_path / "new/start/v3")
    model, start = setting.asks(config, objective, recipe.start).begin()
    assert start.record["fresh"] == []
    for name, parameter in parameters_of(model).items():
        assert_close(parameter, exported[name])
    alone = setting.asks(config, RecipeObjective(mlm=MLM), tmp_path / "v3").run.recipe
    kept = keep_start(alone, str(tmp_path / "alone"))
    assert not Path(kept.start, "generator").exists()


def test_what_lies_beside_is_named_where_it_is_refused(setting: Setting, tmp_path: Path) -> None:
    objective = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings="gradient_disentangled"))
    asked = setting.asks(DEBERTA_V2, objective, tmp_path / "v3")
    export(asked, tmp_path / "pair")
    gather_pair(tmp_path / "pair", tmp_path / "v3", pickled=False)
    (tmp_path / "v3/generator_config.json").write_text("[]")
    with pytest.raises(ModelError, match=rf"^{tmp_path}/v3/generator_config\.json\b"):
        keep_start(asked.run.recipe, str(tmp_path / "new"))
    (tmp_path / "v3/generator_config.json").write_text("{}")
    (tmp_path / "v3/pytorch_model.generator.bin").write_bytes(b"cos\nmkdir\n")
    with pytest.raises(ModelError, match=rf"^{tmp_path}/v3/pytorch_model\.generator\.bin\b"):
        keep_start(asked.run.recipe, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_weights_of_another_shape_are_refused_by_the_places_name(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path / "published")
    export(asked, tmp_path / "published")
    tensors = pickle_weights(tmp_path / "published")
    kept = {name: value for name, value in tensors.items() if ".layer.1." not in name}
    torch.save(kept, tmp_path / "published/pytorch_model.bin")
    for start in (f"{tmp_path}/published", f"file://{tmp_path}/published"):
        with pytest.raises(ModelError, match=rf"^{start}\b.*missing .*layer\.1\."):
            keep_start(asked.run.recipe.model_copy(update={"start": start}), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
