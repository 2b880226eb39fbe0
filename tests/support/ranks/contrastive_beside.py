"""Steps of contrastive training beside other terms on ranks; importable by name, as `run_ranks` needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.text_vectors import WithVectors
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import SopConfig
from encoder_core.objectives.term import TermConfig
from encoder_core.train.exchange import Control
from encoder_core.train.step import Microbatch, RankBatch
from encoder_core.train.zero_memory import Stage
from tests.support.ranks.contrastive import SEED, Outcome, outcome_of

VOCAB, MASK, ROWS = 60, 4, 24
CONTRAST = ContrastiveConfig(temperature=0.5, projection=True, bidirectional=True, weight=3.0)
SETS: Mapping[str, dict[str, TermConfig]] = {
    "mlm": {"mlm": MlmConfig()},
    "sop": {"mlm": MlmConfig(), "sop": SopConfig()},
    "rtd": {"mlm": MlmConfig(), "rtd": ReplacedTokenConfig()},
}
MODEL = BertConfig(
    layers=2,
    hidden=16,
    heads=2,
    feed_forward=32,
    max_length=16,
    vocab=VOCAB,
    dropout=0.2,
    attention_dropout=0.2,
    initializer_range=0.1,
)


@dataclass(frozen=True)
class Case:
    """One way to make one and the same step: terms by a name of `SETS`, rows of a microbatch."""

    terms: str
    microbatch: int
    stage: Stage = 0
    double: bool = False


def fresh_model(terms: str) -> WithVectors:
    torch.manual_seed(SEED)
    model = compose(MODEL, {**SETS[terms], "contrastive": CONTRAST})
    assert isinstance(model, WithVectors)
    initialise(model, MODEL.initializer_range)
    return model


def rows(first: int, last: int) -> Batch:
    """Rows `first` to `last` - 1 of the one batch, as many as there are, every third token hidden."""
    last = min(last, ROWS)
    draws = torch.Generator().manual_seed(SEED)
    texts = [
        torch.randint(5, VOCAB, (int(torch.randint(4, 17, (), generator=draws)),), generator=draws)
        for _ in range(ROWS)
    ][first:last]
    lengths = torch.tensor([len(text) for text in texts])
    tokens, positions = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    targets = (positions % 3 == 1).nonzero().flatten()
    hidden = torch.where(tokens[targets] % 2 == 0, MASK, 7)
    return Batch(
        tokens=tokens.index_copy(0, targets, hidden),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        max_length=int(lengths.max()),
        positions=positions,
        target_positions=targets,
        target_ids=tokens[targets],
        segments=torch.zeros(len(tokens), dtype=torch.int64),
        pair_labels=torch.arange(first, last) % 2,
        numbers=torch.arange(first, last),
    )


def steps(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    control = Control.join()
    return [_step(control, case) for case in cases]


def _step(control: Control, case: Case) -> Outcome:
    objective = fresh_model(case.terms)
    size, total = case.microbatch, -(-ROWS // case.microbatch)
    mine = [Microbatch(i, rows(i * size, (i + 1) * size)) for i in range(control.rank, total, control.world)]
    counts = {name: float(count) for name, count in objective.target_counts(rows(0, ROWS)).items()}
    work = RankBatch(0, tuple(mine), total)
    return outcome_of(objective, control, work, counts, case.stage, double=case.double)


def concatenated(gradient: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([gradient[name].ravel() for name in sorted(gradient)])
