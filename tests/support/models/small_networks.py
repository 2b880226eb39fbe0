"""Every family's network and objective small, with a batch of full rows of equally many targets: for counting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from step_batch import in_random_order, make_batch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import FAMILIES, ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.modules.losses import CoupledObjective, LossSums
from encoder_core.objectives.modules.losses import ObjectiveModule as Module
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.train.exchange import RankExamples
from launcher.runtime.capacity.workload import MicrobatchShape
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import DenoiseTerm, MlmTerm, PlmTerm, RecipeObjective

SHAPE = MicrobatchShape(rows=3, length=40, targets_per_row=6, backwards=True)
_SIZE: dict[str, Any] = {
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "feed_forward": 96,
    "vocab": 500,
    "max_length": 64,
}
_MLM, _VECTORS = MlmTerm(), ContrastiveConfig(projection=True)


@dataclass(frozen=True)
class Network:
    """A model and what it is trained by."""

    name: str
    model: ModelConfig
    objective: RecipeObjective


def _mlm(name: str, model: ModelConfig, **extra: object) -> Network:
    return Network(name, model, RecipeObjective.model_validate({"mlm": _MLM, **extra}))


_SHARED, _DISENTANGLED = (ReplacedTokenConfig(embeddings=sharing) for sharing in ("shared", "gradient_disentangled"))


def _taught(*teachers: ModelConfig, **further: object) -> dict[str, Any]:
    sources = [{"uri": "somewhere", "model": model.model_dump()} for model in teachers]
    return {"distil": {"teachers": sources, **further}, "cosine": {}}


NETWORKS: tuple[Network, ...] = (
    _mlm(
        "distilbert",
        BertConfig(token_types=0, **_SIZE),
        **_taught(BertConfig(**_SIZE), RobertaConfig(**_SIZE)),
    ),
    _mlm(
        "tinybert",
        BertConfig(token_types=0, **_SIZE),
        distil={"teachers": [{"uri": "somewhere", "model": BertConfig(**_SIZE | {"hidden": 64}).model_dump()}]},
        hidden={"projection": 64},
    ),
    _mlm(
        "deberta taught layer by layer",
        DebertaConfig(**_SIZE),
        **_taught(RobertaConfig(**_SIZE)),
        hidden={"layers": [0, 1, 3, 3]},
    ),
    _mlm("bert taught at targets", BertConfig(**_SIZE), **_taught(BertConfig(**_SIZE), places="targets")),
    _mlm("deberta taught by roberta", DebertaConfig(**_SIZE), **_taught(RobertaConfig(**_SIZE))),
    _mlm("roberta", RobertaConfig(**_SIZE)),
    _mlm("bert with next sentences", BertConfig(**_SIZE), nsp=NspConfig()),
    _mlm("bert with relative keys", BertConfig(position="relative_key_query", **_SIZE)),
    _mlm("spanbert", BertConfig(**_SIZE), sbo=SboConfig()),
    _mlm("albert", AlbertConfig(embedding=16, **_SIZE), sop=SopConfig()),
    _mlm("electra", ElectraConfig(embedding=16, generator_divisor=4, **_SIZE), rtd=_SHARED),
    _mlm("electra, embeddings as wide", ElectraConfig(embedding=32, generator_divisor=2, **_SIZE), rtd=_SHARED),
    _mlm("deberta", DebertaConfig(**_SIZE)),
    _mlm("deberta without mask decoder", DebertaConfig(mask_decoder="plain", **_SIZE)),
    _mlm("deberta with order", DebertaConfig(**_SIZE), sop=SopConfig()),
    _mlm("deberta v2", DebertaV2Config(buckets=16, convolution=3, **_SIZE)),
    _mlm("deberta v2 with order", DebertaV2Config(mask_decoder="plain", **_SIZE), sop=SopConfig()),
    _mlm("deberta v3", DebertaV2Config(buckets=16, generator_layers=2, **_SIZE), rtd=_DISENTANGLED),
    _mlm("modernbert", ModernBertConfig(**_SIZE)),
    _mlm(
        "modernbert with dropout",
        ModernBertConfig(**_SIZE, dropout=0.1, attention_dropout=0.1, attention_output_dropout=0.1),
    ),
    _mlm("spanbert with next sentences", BertConfig(**_SIZE), nsp=NspConfig(), sbo=SboConfig()),
    _mlm("albert with spans", AlbertConfig(embedding=16, **_SIZE), sop=SopConfig(), sbo=SboConfig()),
    _mlm("deberta with spans", DebertaConfig(**_SIZE), nsp=NspConfig(), sbo=SboConfig()),
    _mlm("roberta with a generator", RobertaConfig(**_SIZE), rtd=_SHARED, sbo=SboConfig()),
    _mlm("modernbert with a generator", ModernBertConfig(**_SIZE), rtd=_DISENTANGLED, nsp=NspConfig()),
    _mlm("deberta with a generator", DebertaConfig(generator_layers=2, **_SIZE), rtd=_SHARED, sop=SopConfig()),
    _mlm("roberta with vectors", RobertaConfig(**_SIZE), contrastive=_VECTORS),
    _mlm("deberta with order and vectors", DebertaConfig(**_SIZE), sop=SopConfig(), contrastive=_VECTORS),
    _mlm("electra with vectors", ElectraConfig(embedding=16, **_SIZE), rtd=_SHARED, contrastive=_VECTORS),
    _mlm("bert reconstructed", BertConfig(**_SIZE), retromae=RetromaeConfig()),
    _mlm("albert reconstructed", AlbertConfig(embedding=16, **_SIZE), retromae=RetromaeConfig()),
    _mlm("deberta reconstructed", DebertaConfig(**_SIZE), retromae=RetromaeConfig(), contrastive=_VECTORS),
    _mlm("bert condensed", BertConfig(**_SIZE), condenser=CondenserConfig()),
    _mlm("deberta condensed", DebertaConfig(**_SIZE), condenser=CondenserConfig(early=1, layers=1)),
    _mlm("xlm", XlmConfig(**_SIZE | {"feed_forward": 128}, languages=("en", "fr"))),
    _mlm("eurobert", EuroBertConfig(key_value_heads=2, **_SIZE)),
    _mlm("eurobert with dropout", EuroBertConfig(**_SIZE, dropout=0.1, attention_dropout=0.1)),
    Network(
        "xlnet",
        XlnetConfig(reuse=16, memory=24, **_SIZE),
        RecipeObjective(plm=PlmTerm(predict=6, permutation=20)),
    ),
    Network("bart", BartConfig(**_SIZE), RecipeObjective(denoise=DenoiseTerm())),
)

_NAMED = {type(network.model) for network in NETWORKS}
NETWORKS += tuple(_mlm(family.name, family(**_SIZE)) for family in FAMILIES if family not in _NAMED)


def build(network: Network, *, recompute: bool = False) -> Module:
    """The module that is trained, its weights and its teachers' random."""
    torch.manual_seed(0)
    module = objective_module(network.model, network.objective, recompute=recompute)
    if network.objective.distil is not None:
        hold_teachers(module, [Teacher(source.model) for source in network.objective.distil.teachers])
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module.train()


def full_rows(network: Network, shape: MicrobatchShape = SHAPE) -> Batch:
    """Targets in runs of two; for XLNet every second row backwards."""
    batch = make_batch([shape.length] * shape.rows, _SIZE["vocab"])
    inside = torch.arange(shape.targets_per_row) // 2 * 5 + torch.arange(shape.targets_per_row) % 2 + 4
    targets = (torch.arange(shape.rows)[:, None] * shape.length + inside).flatten()
    batch = with_forms(network, replace(batch, target_positions=targets, target_ids=batch.tokens[targets]))
    if network.objective.plm is None:
        return batch
    return replace(in_random_order(batch), reversed_rows=torch.arange(shape.rows) % 2 == 1)


def with_forms(network: Network, batch: Batch) -> Batch:
    """The batch as it is, or with the shorter forms that the encoder of a denoising network reads."""
    if network.objective.denoise is None:
        return batch
    lengths = [network.objective.denoise.mean_form_tokens(length) for length in batch.cu_seqlens.diff().tolist()]
    return replace(batch, causal=True, corrupted=make_batch(lengths, _SIZE["vocab"]))


def memory(network: Network, module: Module, batch: Batch) -> tuple[Tensor, ...]:
    """What the module remembers once its memory is full, or what a first pass found; () of most."""
    remembered: tuple[Tensor, ...] = ()
    if isinstance(module, CoupledObjective):
        return first_pass(module, [batch])[0]
    if network.objective.plm is not None:
        for _ in range(3):
            with torch.no_grad():
                remembered = module(batch, remembered).memory
    return remembered


def first_pass(
    module: Module, batches: Sequence[Batch], seed: Callable[[int], None] = lambda number: None
) -> list[tuple[Tensor, ...]]:
    """For each batch of a step what a coupled objective's second pass wants; () for any other. `seed`: is called with
    the number of the batch before its pass."""
    if not isinstance(module, CoupledObjective):
        return [()] * len(batches)
    own = list[Tensor]()
    with torch.no_grad():
        for number, batch in enumerate(batches):
            seed(number)
            own += module(batch).memory
        everyone, joined = RankExamples.from_all_ranks(own)
        coupled = module.couple(joined, everyone)
    parts = [torch.split(tensor, [len(examples) for examples in own]) for tensor in coupled]
    return list(zip(*parts, strict=True))


def turns(module: Module, batch: Batch, remembered: tuple[Tensor, ...]) -> list[LossSums]:
    """The forward passes of one microbatch: one, or one each turn."""
    losses: list[LossSums] = []
    for _ in module.update_groups():
        losses.append(module(batch, remembered) if remembered else module(batch))
        remembered = losses[-1].memory
    return losses
