"""Runs that start from a model: what each asks for, and the exports and checkpoints they start from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.attempt import claim
from checkpoints.gather import SingleRank
from checkpoints.save import Saver
from data_service.store.open import open_store
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.interchange import Heads
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.replaced import Sharing
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.train.zero_state import MASTER, Fragment
from launcher.runtime.rank.build import build_model
from launcher.runtime.rank.initial_weights import InitialWeights, check_start, initial_weights
from launcher.runtime.recipe.objective import MlmTerm, PlmTerm, RecipeObjective
from launcher.runtime.run.record import Run, open_run
from tests.support.models.parity import make_batch, parameters_of, random_weights
from tests.support.models.written import export_model, export_pair

SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "feed_forward": 48,
    "max_length": 64,
    "dropout": 0.0,
}
SHAPE |= {"attention_dropout": 0.0}
MLM = MlmTerm.model_validate(
    {"rate": 0.15, "unit": "token", "copies": "dynamic", "replace": {"mask": 0.8, "random": 0.1, "keep": 0.1}}
)
SPANS = MLM.model_copy(update={"unit": "span"})
BERT, ROBERTA = BertConfig(**SHAPE), RobertaConfig(**SHAPE)
ELECTRA = ElectraConfig(**SHAPE, embedding=16, generator_divisor=2)
DEBERTA_V2 = DebertaV2Config(**SHAPE, buckets=8)
CASES: dict[str, tuple[ModelConfig, RecipeObjective, Heads]] = {
    "roberta": (ROBERTA, RecipeObjective(mlm=MLM), "mlm"),
    "bert-nsp": (BERT, RecipeObjective(mlm=MLM, nsp=NspConfig()), "mlm_pair"),
    "albert-sop": (
        AlbertConfig(**SHAPE, embedding=16),
        RecipeObjective(mlm=MLM, sop=SopConfig()),
        "mlm_pair",
    ),
    "deberta": (DebertaConfig(**SHAPE), RecipeObjective(mlm=MLM), "mlm"),
    "deberta-v2": (DEBERTA_V2, RecipeObjective(mlm=MLM), "mlm"),
    "xlnet": (XlnetConfig(**SHAPE, reuse=0, memory=0), RecipeObjective(plm=PlmTerm()), "plm"),
}
PAIRS: dict[str, tuple[ModelConfig, Sharing]] = {
    "electra": (ELECTRA, "shared"),
    "deberta-v3-shared": (DEBERTA_V2, "shared"),
    "deberta-v3": (DEBERTA_V2, "gradient_disentangled"),
}


@dataclass(frozen=True)
class Setting:
    """A run over the shared corpus, and its tokenizer."""

    run: Run
    tokenizer: Tokenizer

    def asks(self, config: ModelConfig, objective: RecipeObjective, start: object) -> "Setting":
        update = {"model": config, "objective": objective, "start": str(start)}
        return replace(self, run=replace(self.run, recipe=self.run.recipe.model_copy(update=update)))

    def known(self, config: ModelConfig) -> ModelConfig:
        return config.with_tokenizer(self.tokenizer.vocab_size, self.tokenizer.special.pad)

    def begin(self) -> tuple[nn.Module, InitialWeights]:
        """The run's module with its initial weights in place, as the engine puts them; first checked as by `init`."""
        check_start(self.run.recipe)
        model = build_model(self.run.recipe, self.tokenizer)
        start = initial_weights(self.run, self.tokenizer, model, SingleRank())
        assert start is not None
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start.read(name, MASTER, 0, p.numel()).view_as(p))
        start.close()
        return model.eval(), start


def fresh(setting: Setting) -> dict[str, Tensor]:
    return parameters_of(build_model(setting.run.recipe, setting.tokenizer))


def export(setting: Setting, folder: Path, heads: Heads = "mlm") -> nn.Module:
    """A module of random weights as the recipe asks, exported to `folder`."""
    recipe = setting.run.recipe
    model = random_weights(build_model(recipe, setting.tokenizer)).eval()
    files, config = setting.tokenizer.save_files(), setting.known(recipe.model)
    if recipe.objective.rtd is not None:
        sharing = recipe.objective.rtd.embeddings
        export_pair(parameters_of(model).__getitem__, config, files, open_store(folder), sharing)
    else:
        export_model(parameters_of(model).__getitem__, config, files, open_store(folder), heads)
    return model


def rows(vocab: int) -> Batch:
    made = make_batch([9, 40, 17], vocab, segments=True)
    order = torch.zeros_like(made.tokens)
    order[made.target_positions] = 1 + torch.arange(len(made.target_positions))
    return replace(made, order=order)


def trained(
    setting: Setting, uri: str, config: ModelConfig, objective: RecipeObjective, seed: int = 3
) -> dict[str, Tensor]:
    """Commit a checkpoint of random weights to the run at `uri`, whose recipe asks for this model."""
    run = open_run(uri)
    recipe = run.recipe.model_copy(update={"model": config, "objective": objective})
    run.store.put("recipe.yaml", recipe.to_yaml().encode())
    model = random_weights(build_model(recipe, setting.tokenizer), seed=seed)
    values = parameters_of(model)
    saver = Saver(run.store, claim(run.store), SingleRank(), resumed=None)
    saver.begin(
        4,
        [
            Fragment(name, 0, dict.fromkeys((MASTER, "exp_avg", "exp_avg_sq"), value.flatten()))
            for name, value in values.items()
        ],
        {name: tuple(value.shape) for name, value in values.items()},
        {},
    )
    saver.wait_for_all(lambda sent: None)
    saver.commit()
    saver.close()
    return values
