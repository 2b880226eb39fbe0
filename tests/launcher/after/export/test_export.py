"""A checkpoint of every family and objective, exported and loaded by transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import PreTrainedModel

from checkpoints.attempt import claim
from checkpoints.errors import ExportError
from checkpoints.gather import SingleRank
from checkpoints.save import Saver
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.train.zero_state import MASTER, Fragment
from launcher.after.diagnose.states import open_frozen_encoder
from launcher.after.export.export import export_run
from launcher.runtime.rank.build import build_model
from launcher.runtime.recipe.continued import continued_recipe
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.run.log import RunLog
from launcher.runtime.run.record import open_run
from tests.support.models.exports import DISENTANGLED, FAMILIES, MLM
from tests.support.models.parity import random_weights
from tests.support.runs.starts import BERT, Setting, trained

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 48, "max_length": 64}
DETECTION = ReplacedTokenConfig()

Case = tuple[ModelConfig, RecipeObjective, dict[str, str | None], tuple[str, ...]]


def family(name: str, models: dict[str, str | None], *left_out: str) -> Case:
    return FAMILIES[name].config, FAMILIES[name].objective, models, left_out


CASES: dict[str, Case] = {
    "bert-nsp": family("bert", {".": "BertForPreTraining"}),
    "spanbert": family("spanbert", {".": "BertForMaskedLM"}, "boundary_head"),
    "albert-sop": family("albert", {".": "AlbertForPreTraining"}),
    "deberta-v2": family("deberta-v2", {".": "DebertaV2ForMaskedLM"}),
    "deberta-v3": family("deberta-v3", {"generator": "DebertaV2ForMaskedLM", "discriminator": "DebertaV2Model"}),
    "xlnet": family("xlnet", {".": "XLNetLMHeadModel"}),
    "bert-retromae": (
        BertConfig(**SHAPE),
        RecipeObjective(mlm=MLM, retromae=RetromaeConfig()),
        {".": "BertForMaskedLM"},
        ("shallow_decoder",),
    ),
    "modernbert-condenser": (
        ModernBertConfig(**SHAPE),
        RecipeObjective(mlm=MLM, condenser=CondenserConfig()),
        {".": "ModernBertForMaskedLM"},
        ("condenser",),
    ),
    "deberta-sop": (
        DebertaConfig(**SHAPE, mask_decoder="plain"),
        RecipeObjective(mlm=MLM, sop=SopConfig()),
        {".": "DebertaForMaskedLM"},
        ("pair_head",),
    ),
    "roberta-vectors": (
        RobertaConfig(**SHAPE),
        RecipeObjective(mlm=MLM, contrastive=ContrastiveConfig(projection=True)),
        {".": "RobertaForMaskedLM"},
        ("projection",),
    ),
    "electra-vectors": (
        FAMILIES["electra"].config,
        RecipeObjective(mlm=MLM, rtd=DETECTION, contrastive=ContrastiveConfig()),
        {"generator": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining"},
        (),
    ),
    "roberta-nsp-rtd": (
        RobertaConfig(**SHAPE),
        RecipeObjective(mlm=MLM, nsp=NspConfig(), rtd=DISENTANGLED),
        {"generator": "RobertaForMaskedLM", "discriminator": "RobertaModel"},
        ("pair_head",),
    ),
    "modernbert-rtd": (
        ModernBertConfig(**SHAPE, generator_layers=2),
        RecipeObjective(mlm=MLM, rtd=DETECTION),
        {"generator": "ModernBertForMaskedLM", "discriminator": "ModernBertModel"},
        (),
    ),
    "neobert-vectors": (
        NeoBertConfig(**SHAPE),
        RecipeObjective(mlm=MLM, contrastive=ContrastiveConfig()),
        {".": None},
        (),
    ),
    "neobert-rtd": (
        NeoBertConfig(**SHAPE, generator_layers=2),
        RecipeObjective(mlm=MLM, rtd=DETECTION),
        {"generator": None, "discriminator": None},
        (),
    ),
}


@pytest.mark.parametrize(("config", "objective", "models", "left_out"), CASES.values(), ids=CASES)
def test_a_checkpoint_becomes_what_transformers_loads(
    fresh_run: str,
    tmp_path: Path,
    config: ModelConfig,
    objective: RecipeObjective,
    models: dict[str, str | None],
    left_out: tuple[str, ...],
) -> None:
    run = open_run(fresh_run)
    recipe = run.recipe.model_copy(update={"model": config, "objective": objective})
    run = replace(run, recipe=recipe)
    model = random_weights(build_model(recipe, load_tokenizer(recipe.tokenizer.uri)))
    fragments = [Fragment(name, 0, {MASTER: p.detach().flatten()}) for name, p in model.named_parameters()]
    saver = Saver(run.store, claim(run.store), SingleRank())
    saver.begin(5, fragments, {name: tuple(p.shape) for name, p in model.named_parameters()}, {})
    saver.wait_for_all(lambda sent: None)
    saver.commit()
    saver.close()

    exported = export_run(run, None, str(tmp_path / "out"), licence="cc-by-4.0")
    assert (exported.step, exported.models, exported.left_out) == (5, models, left_out)
    for folder, architecture in exported.models.items():
        where = tmp_path / "out" / folder
        if architecture is None:
            _assert_names_no_class(where)
            continue
        loaded, report = getattr(transformers, architecture).from_pretrained(where, output_loading_info=True)
        unexpected = {
            name for name in report["unexpected_keys"] if "mask_predictions" not in name and not name.startswith("disc")
        }
        assert not unexpected - {"deberta.embeddings.position_embeddings.weight"}
        assert not [name for name in report["missing_keys"] if not name.startswith("pooler.")]  # RoBERTa has none
        assert not report["mismatched_keys"]
        card = (where / "README.md").read_text()
        assert yaml.safe_load(card.split("---")[1])["license"] == "cc-by-4.0"
        source = run.recipe.corpus.sources["text"]
        for said in (f"`{architecture}`", "step 5 of 14", source.uri, run.record.inputs.corpora["text"][:12]):
            assert said in card
        assert "none " in card
        if folder != "discriminator":  # further heads are the generator's
            assert all(f": {part}" in card for part in left_out)
        vectors = objective.contrastive is not None and folder == "."
        assert (where / "modules.json").exists() == vectors  # of sentence-transformers
        words = loaded.get_input_embeddings().weight
        assert torch.equal(words[:9], _words(model, folder)[:9])


def _assert_names_no_class(folder: Path) -> None:
    """Nothing says that transformers or sentence-transformers loads it; what the card names does."""
    card = (folder / "README.md").read_text()
    assert not {"pipeline_tag", "library_name"} & yaml.safe_load(card.split("---")[1]).keys()
    assert "diagnose" in card
    assert "import" not in card.split("## Recipe")[0]
    assert "architectures" not in json.loads((folder / "config.json").read_bytes())
    assert not (folder / "modules.json").exists()
    with pytest.raises(ValueError, match="neobert"):
        transformers.AutoModel.from_pretrained(folder)
    assert open_frozen_encoder(str(folder)).encoder is not None
    assert continued_recipe(str(folder)).model.family == "neobert"


def test_an_export_replaces_the_one_before_and_nothing_else(fresh_run: str, tmp_path: Path) -> None:
    run = open_run(fresh_run)
    trained(Setting(run, run.tokenizer()), fresh_run, BERT, RecipeObjective(mlm=MLM))
    run = open_run(fresh_run)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text("{}")
    with pytest.raises(ExportError, match=r"config\.json"):
        export_run(run, None, str(tmp_path / "theirs"))
    assert (tmp_path / "theirs/config.json").read_text() == "{}"
    for licence in (None, "Apache-2.0"):
        export_run(run, None, str(tmp_path / "out"), licence=licence)
    assert "license: apache-2.0" in (tmp_path / "out/README.md").read_text()
    export_run(run, None, str(tmp_path / "out"), licence="Our own terms")
    card = (tmp_path / "out/README.md").read_text()
    assert "license: other" in card
    assert "## Licence\n\nOur own terms\n" in card


def test_the_card_states_the_loss_at_its_step(fresh_run: str, tmp_path: Path) -> None:
    run = open_run(fresh_run)
    trained(Setting(run, run.tokenizer()), fresh_run, BERT, RecipeObjective(mlm=MLM))
    journal = RunLog(run.store, 1, 1000.0, lambda line: None)
    for step, loss in ((2, 5.5), (4, 4.25), (6, 3.0)):
        figures = {"loss": loss, "mlm_loss": loss, "perplexity": 70.1}
        journal.add_metrics({"kind": "evaluation", "step": step, **figures})
    journal.close()
    export_run(open_run(fresh_run), None, str(tmp_path / "out"))
    card = (tmp_path / "out/README.md").read_text()
    assert re.search(r"\bmlm 4\.250 \(perplexity 70\.10\).*\bstep 4\b", card)


@torch.no_grad()
def _words(model: PreTrainedModel, part: str) -> torch.Tensor:
    network = model if part == "." else getattr(model, part)
    embedded: torch.Tensor = network.encoder.embeddings.word(torch.arange(9))
    return embedded
