"""Text that was taken out of a corpus has no part in any loss, and rows that held nothing else are not in the batch."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from data_service.corpus.removals import replace_removed_text
from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.samples import Samples, distribute_rows
from data_service.samples.spec import SourceSpec
from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.compose import compose
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.distil import CosineConfig, DistilConfig, HiddenConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.term import TermConfig
from encoder_core.train.exchange import RankExamples
from launcher.runtime.rank.collate import to_batch
from tests.support.data.corpora import SPECIAL, VOCABULARY, block_of_pairs, random_block, spec_of

CPU = torch.device("cpu")
SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "feed_forward": 32, "max_length": 32, "vocab": VOCABULARY}
BERT = BertConfig.model_validate({**SHAPE, "dropout": 0.0, "attention_dropout": 0.0})
SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)


def samples(seed: int, packing: str, share: float = 0.5) -> Samples:
    """Rows of a block from which this share of the documents is removed."""
    rng = np.random.default_rng(seed)
    texts = packing in ("pairs", "sentences")
    block = block_of_pairs(seed, 12, 2) if packing == "pairs" else random_block(seed, 400, document=2.0)
    edges = block.sentences[block.documents]
    gone = np.flatnonzero(rng.random(len(edges) - 1) < share)
    hollow = replace_removed_text(block, np.stack([edges[gone], edges[gone + 1]], axis=1), SPECIAL.pad)
    masking = {"kind": "none"} if texts else {"kind": "mlm"}
    spec = spec_of(SOURCE, length=24, input={"packing": packing}, masking=masking)
    rows = cut_block(hollow, spec, stream_key("cut"))
    return make_rows(hollow, rows, 0, len(rows), spec, stream_key("x"))


def lasting(made: Samples) -> np.ndarray:
    """The numbers of rows that have other tokens than holes."""
    assert made.holes is not None
    edges = np.searchsorted(made.holes, made.offsets)
    return np.flatnonzero(np.diff(edges) < np.diff(made.offsets))


@pytest.mark.parametrize("packing", ["doc_sentences", "full_sentences", "segment_pair", "pairs", "sentences"])
def test_rows_that_held_nothing_else_are_left_out_and_the_others_keep_their_numbers(packing: str) -> None:
    left_out = 0
    for seed in range(6):
        made = samples(seed, packing)
        kept = lasting(made)
        left_out += made.rows - len(kept)
        batch, (others,) = to_batch(made, CPU, first_number=7), distribute_rows(made, [kept])
        expected, group = to_batch(others, CPU), batch.group
        numbers = (7 + kept[:, None]) * group + np.arange(group)
        assert batch.numbers is not None
        assert batch.numbers.tolist() == numbers.ravel().tolist()
        for field in fields(Batch):
            ours, theirs = getattr(batch, field.name), getattr(expected, field.name)
            if field.name == "numbers":
                continue
            assert type(ours) is type(theirs)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert left_out > 3


def test_a_batch_of_nothing_else_is_idle() -> None:
    batch = to_batch(samples(1, "doc_sentences", share=1.0), CPU)
    assert (batch.rows, batch.tokens.numel(), batch.loss_token_count) == (0, 0, 0)


def detection() -> ObjectiveModule:
    config = ElectraConfig.model_validate({**SHAPE, "embedding": 8, "generator_divisor": 2, "dropout": 0.0})
    return ReplacedTokenConfig().build(config)


def distillation() -> ObjectiveModule:
    terms: dict[str, TermConfig] = {
        "mlm": MlmConfig(),
        "distil": DistilConfig(teachers=(TeacherSource(uri="teacher", model=BERT),)),
        "cosine": CosineConfig(),
        "hidden": HiddenConfig(),
    }
    module, teacher = compose(BERT, terms), Teacher(BERT).double()
    torch.manual_seed(3)
    initialise(teacher)
    hold_teachers(module, [teacher])
    return module


@pytest.mark.parametrize("build", [detection, distillation])
def test_losses_over_all_tokens_are_sums_over_those_that_are_kept(
    build: Callable[[], ObjectiveModule],
) -> None:
    module = build()
    torch.manual_seed(1)
    initialise(module)
    module = module.double().eval()
    whole = replace(to_batch(samples(4, "full_sentences", share=0.3), CPU), kept=None)
    chosen = torch.rand(whole.tokens.numel(), generator=torch.Generator().manual_seed(0)) < 0.4
    found: list[LossSums] = []
    for batch in (
        whole,
        replace(whole, kept=chosen.nonzero()[:, 0]),
        replace(whole, kept=(~chosen).nonzero()[:, 0]),
    ):
        torch.manual_seed(5)
        found.append(module(batch))
        assert module.target_counts(batch) == {term.name: term.targets for term in found[-1].terms}
    compared = 0
    for all_of_it, one, other in zip(*(sums.terms for sums in found), strict=True):
        if all_of_it.name != "mlm":
            assert one.targets + other.targets == all_of_it.targets == whole.tokens.numel()
            torch.testing.assert_close(one.loss_sum + other.loss_sum, all_of_it.loss_sum)
            compared += 1
    assert compared


def test_an_example_that_was_taken_out_is_no_negative() -> None:
    model = ContrastiveConfig().build(BERT)
    torch.manual_seed(2)
    initialise(model)
    made = samples(3, "pairs")
    (others,) = distribute_rows(made, [lasting(made)])
    assert 1 < others.rows < made.rows
    sums = []
    for rows in (made, others):
        vectors = model.embed(to_batch(rows, CPU))
        everyone, own = RankExamples.from_one_microbatch(vectors)
        sums.append(model.losses(own, model.couple(own.detach(), everyone)).terms[0])
    assert sums[0].targets == sums[1].targets == others.rows
    torch.testing.assert_close(sums[0].loss_sum, sums[1].loss_sum)
