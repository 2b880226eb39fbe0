"""Text vectors begin with the discriminator of a pair: of a run's checkpoint, or of a folder that holds both."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from data_service.store.open import open_store
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from launcher.after.export.export import export_run
from launcher.errors import RunError
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.run.record import open_run
from tests.support.models.parity import parameters_of
from tests.support.models.written import export_model
from tests.support.runs.starts import BERT, MLM, PAIRS, Setting, export, fresh, trained

VECTORS = RecipeObjective(contrastive=ContrastiveConfig(projection=True))


def detection(sharing: Sharing) -> RecipeObjective:
    return RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))


def reloaded(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModel.from_pretrained(folder).named_parameters())


@pytest.mark.long
@pytest.mark.parametrize(("config", "sharing"), PAIRS.values(), ids=PAIRS)
def test_the_discriminator_of_a_run_or_of_its_export(
    setting: Setting, other_run: str, tmp_path: Path, config: ModelConfig, sharing: Sharing
) -> None:
    """What transformers reads of both exports, the pair's and that of the vectors before any step, is the same."""
    trained(setting, other_run, config, detection(sharing))
    export_run(open_run(other_run), None, str(tmp_path / "pair"))
    for place in (other_run, tmp_path / "pair"):
        asked = setting.asks(config, VECTORS, place)
        model, start = asked.begin()
        known = asked.known(config)
        out = open_store(tmp_path / Path(place).name / "vectors")
        export_model(parameters_of(model).__getitem__, known, setting.tokenizer.save_files(), out, "none")
        found, expected = reloaded(Path(out.root)), reloaded(tmp_path / "pair/discriminator")  # type: ignore[attr-defined]
        assert found.keys() <= expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert start.record["fresh"] == ["projection.weight", "projection.bias"]
        if place == other_run:
            assert (start.record["network"], start.record["start_step"]) == ("discriminator", 4)
            assert start.record["left"], "the head that says what was replaced"
        assert torch.equal(parameters_of(model)["projection.weight"], fresh(asked)["projection.weight"])


def test_a_generator_alone_is_not_taken_for_the_pair(setting: Setting, tmp_path: Path) -> None:
    export(setting.asks(PAIRS["electra"][0], detection("shared"), "scratch"), tmp_path)
    (tmp_path / "discriminator/config.json").unlink()
    with pytest.raises(RunError, match=r"^start: .*\bpair\b"):
        setting.asks(BERT, VECTORS, tmp_path).begin()
