"""SpanBERT's boundary targets and losses against a literal statement."""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from encoder_core.batch import Batch
from encoder_core.families.bert import BertConfig
from encoder_core.layers.sizes import MAX_SPAN_TARGETS
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.span_boundary import SboConfig, boundary_targets
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, trained_by


def masked(lengths: list[int], targets: list[int]) -> Batch:
    batch = make_batch(lengths, 50)
    positions = torch.tensor(targets, dtype=torch.int64)
    return replace(batch, target_positions=positions, target_ids=positions % 50)


def literal(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(left, right, place, id) of every target, by walking over each row."""
    ids = dict(zip(batch.target_positions.tolist(), batch.target_ids.tolist(), strict=True))
    found = []
    edges = batch.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(edges):
        at = start
        while at < stop:
            if at not in ids:
                at += 1
                continue
            first = at
            while at < stop and at in ids:
                at += 1
            # the boundary must be text: neither the row's first token nor its last
            if first - 1 > start and at < stop - 1:
                for place, position in enumerate(range(first, at)[:MAX_SPAN_TARGETS]):
                    found.append((first - 1, at, place, ids[position]))
    return found


def columns(batch: Batch) -> list[tuple[int, int, int, int]]:
    targets = boundary_targets(batch)
    parts = (targets.left, targets.right, targets.place, targets.ids)
    return list(zip(*(part.tolist() for part in parts), strict=True))


@given(
    st.lists(st.integers(1, 45), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=12),
)
def test_targets_of_any_batch(lengths: list[int], runs: list[tuple[bool, int]]) -> None:
    """Spans at the ends of rows, over two rows, and longer than the limit."""
    chosen = [is_target for is_target, length in runs for _ in range(length)]
    batch = masked(lengths, [i for i, is_target in enumerate(chosen[: sum(lengths)]) if is_target])
    assert columns(batch) == literal(batch)


def test_losses_are_the_literal_formula() -> None:
    model = trained_by(BertConfig(**SIZE), MlmConfig(), SboConfig())
    batch = masked([20, 30], [4, 5, 6, 12, 24, 25, 26, 27, 40])
    hidden = model.encoder(batch)
    head, word = model.boundary_head, model.encoder.embeddings.word.weight
    total = torch.zeros((), dtype=torch.float64)
    correct = 0
    for left, right, place, target in literal(batch):
        x = torch.cat([hidden[left], hidden[right], head.place.weight[place]])
        x = F.layer_norm(F.gelu(head.first(x)), (16,), head.first_norm.weight, head.first_norm.bias, 1e-12)
        x = F.layer_norm(F.gelu(head.second(x)), (16,), head.second_norm.weight, head.second_norm.bias, 1e-12)
        logits = word @ x + head.decoder.bias
        total = total - logits.log_softmax(0)[target]
        correct += int(logits.argmax() == target)
    outcome = model(batch)
    mlm, sbo = outcome.terms
    assert (mlm.name, mlm.targets, sbo.name, sbo.targets) == ("mlm", 9, "sbo", 9)
    assert model.target_counts(batch) == {"mlm": 9, "sbo": 9}
    torch.testing.assert_close(sbo.loss_sum, total)
    expected = F.cross_entropy(model.logits(batch), batch.target_ids, reduction="sum")
    torch.testing.assert_close(mlm.loss_sum, expected)
    assert outcome.metrics["sbo_correct"] == correct
    assert head.place.weight.shape == (15, 200)
