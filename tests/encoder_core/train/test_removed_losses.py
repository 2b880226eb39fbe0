"""Of every objective: removed text is no input, and no loss is taken from it. Held to the text of each row, token by
token, without a look at what the rows say of their holes."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_service.corpus.removals import replace_removed_text
from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.masking import NO_TABLES, MaskingTables
from data_service.samples.samples import Samples
from data_service.samples.spec import SourceSpec
from data_service.types import Block
from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule
from encoder_core.objectives.modules.multitask import multitask_model
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig, boundary_targets
from launcher.runtime.rank.collate import to_batch
from tests.support.data.corpora import SPECIAL, VOCABULARY, random_block, spec_of

CPU = torch.device("cpu")
FROM = 300  # ids of removed text
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "max_length": 32, "vocab": VOCABULARY}
PLAIN = {**SHAPE, "dropout": 0.0, "attention_dropout": 0.0}
BERT = BertConfig.model_validate(PLAIN)
XLNET = XlnetConfig.model_validate({**PLAIN, "memory": 0, "reuse": 0})
ELECTRA = ElectraConfig.model_validate({**SHAPE, "embedding": 8, "generator_divisor": 2, "dropout": 0.0})
SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
MLM = {"kind": "mlm", "rate": 0.3}
SPANS = MaskingTables(starts_word=np.arange(VOCABULARY) % 3 != 0)


@dataclass(frozen=True)
class Case:
    """An objective, and the rows that it trains on."""

    build: Callable[[], ObjectiveModule]
    rows: dict[str, Any]
    tables: MaskingTables = NO_TABLES


CASES = {
    "mlm": Case(lambda: masked_language_model(BERT), {"input": {"packing": "full_sentences"}, "masking": MLM}),
    "nsp": Case(
        lambda: multitask_model(BERT, [MlmConfig(), NspConfig()]),
        {"input": {"packing": "segment_pair"}, "masking": MLM},
    ),
    "nsp of sentences": Case(
        lambda: multitask_model(BERT, [MlmConfig(), NspConfig()]),
        {"input": {"packing": "sentence_pair"}, "masking": MLM},
    ),
    "sop": Case(
        lambda: multitask_model(BERT, [MlmConfig(), SopConfig()]),
        {"input": {"packing": "ordered_pair"}, "masking": MLM},
    ),
    "sbo": Case(
        lambda: multitask_model(BERT, [MlmConfig(), SboConfig()]),
        {"input": {"packing": "doc_sentences"}, "masking": {**MLM, "unit": "span"}},
        SPANS,
    ),
    "retromae": Case(
        lambda: multitask_model(BERT, [MlmConfig(), RetromaeConfig()]),
        {"input": {"packing": "two_segments"}, "masking": MLM},
    ),
    "rtd": Case(
        lambda: ReplacedTokenConfig().build(ELECTRA),
        {"input": {"packing": "two_segments"}, "masking": MLM},
    ),
    "plm": Case(
        lambda: PlmConfig().build(XLNET),
        {
            "input": {"packing": "lanes", "reuse": 12},
            "masking": {"kind": "plm", "predict": 4, "unit": "piece"},
        },
    ),
}


@dataclass(frozen=True)
class Made:
    """Rows of a block whose removed documents hold some text, and the same with another text there.

    Attributes:
        removed: [T] bool, whether each token of the rows is of a removed document, known by its id where nothing is
            removed.
    """

    samples: Samples
    batch: Batch
    other: Batch
    removed: np.ndarray


def made(case: Case, seed: int) -> Made:
    rng = np.random.default_rng(seed)
    block = random_block(seed, int(rng.integers(200, 600)), document=float(rng.choice([2.0, 6.0])))
    edges = block.sentences[block.documents]
    gone = np.flatnonzero(rng.random(len(edges) - 1) < rng.choice([0.1, 0.4, 0.8]))
    stretches = np.stack([edges[gone], edges[gone + 1]], axis=1)
    spec = spec_of(SOURCE, length=24, **case.rows)
    of_text = np.zeros(len(block.tokens), dtype=np.bool_)
    for start, stop in stretches:
        of_text[start:stop] = True
    block = replace(block, tokens=(5 + block.tokens % (FROM - 5)).astype(np.uint16))
    marked = _with_other_text(block, of_text, rng)

    def rows_of(each: Block) -> Samples:
        rows = cut_block(each, spec, stream_key("cut"))
        return make_rows(each, rows, 0, len(rows), spec, stream_key("x"), case.tables)

    found = [rows_of(replace_removed_text(each, stretches, SPECIAL.pad)) for each in (block, marked)]
    removed = _originals(rows_of(marked)) >= FROM
    return Made(found[0], to_batch(found[0], CPU), to_batch(found[1], CPU), removed)


SPECIAL_IDS = [SPECIAL.cls, SPECIAL.sep, SPECIAL.pad]


def _with_other_text(block: Block, of_text: np.ndarray, rng: np.random.Generator) -> Block:
    """The block with ids from `FROM` on in the removed text, which no other text has."""
    tokens = block.tokens.copy()
    tokens[of_text] = rng.integers(FROM, VOCABULARY, int(of_text.sum()))
    return replace(block, tokens=tokens)


def _originals(samples: Samples) -> np.ndarray:
    tokens = samples.tokens.copy()
    tokens[samples.target_positions] = samples.target_ids
    return tokens


def sums_of(module: ObjectiveModule, batch: Batch) -> LossSums:
    torch.manual_seed(5)
    sums: LossSums = module(batch)
    assert module.target_counts(batch) == {term.name: term.targets for term in sums.terms}
    return sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_no_input_and_no_loss(name: str, seed: int) -> None:
    case = CASES[name]
    it = made(case, seed)
    for field in fields(Batch):
        one, other = getattr(it.batch, field.name), getattr(it.other, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert it.removed.any()
    module = case.build()
    torch.manual_seed(1)
    initialise(module)
    module = module.double().eval()
    targets = it.samples.target_positions
    assert not it.removed[targets].any()
    assert (it.samples.tokens[it.removed] == SPECIAL.pad).all()
    if not it.batch.rows:
        return
    counted = {term.name: term.targets for term in sums_of(module, it.batch).terms}
    rows = list(pairwise(it.samples.offsets.tolist()))
    text = np.isin(_originals(it.samples), SPECIAL_IDS, invert=True)
    lost = [it.removed[a:b].any() and not (text & ~it.removed)[a:b].any() for a, b in rows]
    expected = {"mlm": len(targets), "plm": len(targets)}
    expected["nsp"] = expected["sop"] = sum(not it.removed[a:b].any() for a, b in rows)
    expected["rtd"] = sum(int((~it.removed[a:b]).sum()) for (a, b), gone in zip(rows, lost, strict=True) if not gone)
    expected["retromae"] = sum(
        int((~it.removed[a + 1 : b]).sum()) for (a, b), gone in zip(rows, lost, strict=True) if not gone
    )
    expected["sbo"] = boundary_targets(it.batch).ids.numel()
    assert counted == {term: expected[term] for term in counted}


@pytest.mark.parametrize("name", ["nsp", "nsp of sentences", "sop"])
@pytest.mark.parametrize("seed", range(2))
def test_the_loss_of_pairs_is_that_of_whole_rows(name: str, seed: int) -> None:
    """By the formula, row by row; the removed ones change neither the loss nor a gradient."""
    it = made(CASES[name], seed)
    module: Any = CASES[name].build()
    torch.manual_seed(1)
    initialise(module)
    module = module.double().eval()
    if not it.batch.rows:
        return
    term = sums_of(module, it.batch).terms[1]
    rows = list(pairwise(it.samples.offsets.tolist()))
    whole = [row for row, (a, b) in enumerate(rows) if not it.removed[a:b].any()]
    labels = it.samples.pair_label
    assert labels is not None
    numbers = it.batch.numbers
    assert numbers is not None
    hidden, total = module.encoder(it.batch), torch.zeros((), dtype=torch.float64)
    for row in whole:
        first = int(it.batch.cu_seqlens[numbers.tolist().index(row)])
        pooled = torch.tanh(module.pair_head.pooler(hidden[first]))
        total = total + F.cross_entropy(module.pair_head.classifier(pooled), torch.tensor(int(labels[row])))
    torch.testing.assert_close(term.loss_sum, total)
    changed = it.batch.pair_labels.clone() if it.batch.pair_labels is not None else None
    assert changed is not None
    spoilt = [at for at, row in enumerate(numbers.tolist()) if row not in whole]
    changed[spoilt] = 1 - changed[spoilt]
    assert sums_of(module, replace(it.batch, pair_labels=changed)).terms[1].loss_sum == term.loss_sum
