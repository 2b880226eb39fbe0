"""XLNet against transformers: one stream and two, with memory, segments, padding and reversed rows."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import XLNetLMHeadModel
from transformers.models.xlnet.modeling_xlnet import XLNetModel

from encoder_core.batch import Batch
from encoder_core.errors import ModelError, TrainingError
from encoder_core.families import xlnet as hf
from encoder_core.families.catalogue import hf_format_of
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.xlnet_encoder import Memory
from encoder_core.objectives.modules.permuted import PermutedLanguageModel
from encoder_core.objectives.plm import PlmConfig
from tests.support.models.parity import (
    assert_close,
    assert_same_gradients,
    make_batch,
    mean_loss,
    pad,
    permuted_inputs,
    random_weights,
)
from tests.support.models.peers import peers

CONFIG = XlnetConfig(
    layers=3,
    hidden=32,
    heads=4,
    feed_forward=48,
    max_length=40,
    vocab=101,
    reuse=10,
    memory=14,
    attention_dropout=0.1,
)
RAGGED, FULL = [17, 40, 5, 28], [24, 24, 24, 24]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """transformers makes its sinusoids in fp32, which two streams in fp64 then cannot multiply: widen them."""
    encode = XLNetModel.relative_positional_encoding
    monkeypatch.setattr(XLNetModel, "relative_positional_encoding", lambda *a, **k: encode(*a, **k).to(request.param))
    return request.param


def models(
    dtype: torch.dtype, direction: Literal["theirs_to_ours", "ours_to_theirs"] = "ours_to_theirs", **fields: object
) -> tuple[PermutedLanguageModel, XLNetLMHeadModel]:
    return peers(CONFIG, dtype, direction, "plm", **fields)


def permuted(lengths: list[int], *, segments: bool = True, seed: int = 0) -> Batch:
    """A batch with a factorisation order: unpredicted tokens first, then targets in any order. Segment ids 0 to 2."""
    batch = make_batch(lengths, 101, segments=segments, seed=seed)
    draws = torch.Generator().manual_seed(seed)
    order = torch.zeros_like(batch.tokens)
    target = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        chosen = start + torch.randperm(stop - start, generator=draws)[: (stop - start) // 3]
        target[chosen] = True
        order[chosen] = 1 + torch.randperm(len(chosen), generator=draws)
        if batch.segments is not None:
            batch.segments[stop - 1] = 2  # XLNet's [CLS], last in its row
    at = target.nonzero().flatten()
    ids = torch.randint(8, 101, (len(at),), generator=draws)
    return replace(batch, order=order, target_positions=at, target_ids=ids)


def check_two_streams(
    ours: PermutedLanguageModel,
    theirs: XLNetLMHeadModel,
    batch: Batch,
    dtype: torch.dtype,
    memory: Memory | None = None,
    their_memory: list[Tensor] | None = None,
) -> tuple[Memory, list[Tensor]]:
    inputs = permuted_inputs(batch, dtype, 5)
    expected = theirs(**inputs.arguments, mems=their_memory, use_mems=memory is not None, output_hidden_states=True)
    states = ours.encoder.states(batch, memory)
    assert 2 * len(states) == len(expected.hidden_states)
    for depth, state in enumerate(states):
        assert_close(state.content, inputs.flat(expected.hidden_states[2 * depth]))
        assert state.query is not None
        assert_close(state.query, expected.hidden_states[2 * depth + 1][inputs.real])
    assert_close(ours.logits(batch, memory), expected.logits[inputs.real])
    sums = ours(batch, memory)
    assert_close(mean_loss(sums), expected.loss)
    if memory is not None:
        for mine, their in zip(sums.memory, expected.mems, strict=True):
            assert_close(mine, their.transpose(0, 1))
    return sums.memory, expected.mems


@pytest.mark.parametrize("lengths", [RAGGED, FULL], ids=["ragged", "full"])
@pytest.mark.parametrize("segments", [True, False], ids=["segments", "no_segments"])
def test_both_streams_equal_transformers(dtype: torch.dtype, lengths: list[int], segments: bool) -> None:
    ours, theirs = models(dtype, "theirs_to_ours")
    check_two_streams(ours, theirs, permuted(lengths, segments=segments), dtype)


@pytest.mark.parametrize("lengths", [RAGGED, FULL], ids=["ragged", "full"])
def test_one_stream_sees_every_token(dtype: torch.dtype, lengths: list[int]) -> None:
    ours, theirs = models(dtype)
    batch = make_batch(lengths, 101, segments=True)
    rectangle = pad(batch, 5)
    expected = theirs(
        rectangle.input_ids,
        attention_mask=rectangle.attention_mask.to(dtype),
        token_type_ids=rectangle.token_type_ids,
        use_mems=False,
        output_hidden_states=True,
    )
    for state, hidden in zip(ours.encoder.states(batch), expected.hidden_states, strict=True):
        assert_close(state.content, rectangle.flat(hidden))
        assert state.query is None
        assert state.memory == ()


@pytest.mark.parametrize("bi_data", [False, True], ids=["forward", "half_reversed"])
def test_memory_over_several_steps(dtype: torch.dtype, bi_data: bool) -> None:
    """The memory fills (10 tokens a step, 14 kept), is passed on, and stays equal."""
    ours, theirs = models(dtype, bi_data=bi_data)
    memory: Memory = ()
    their_memory: list[Tensor] | None = None
    flags = torch.tensor([False, False, True, True]) if bi_data else None
    for step in range(4):
        batch = replace(permuted(FULL, seed=step), reversed_rows=flags)
        memory, their_memory = check_two_streams(ours, theirs, batch, dtype, memory, their_memory)
        assert [m.shape for m in memory] == [(4, min(10 * (step + 1), 14), 32)] * 3
        assert not any(m.requires_grad for m in memory)


@pytest.mark.parametrize("dtype", [torch.float64], indirect=True)
def test_same_gradients(dtype: torch.dtype) -> None:
    ours, theirs = models(dtype)
    batch = permuted(FULL)
    memory = ours(permuted(FULL, seed=1), ()).memory
    inputs = permuted_inputs(batch, dtype, 5)
    expected = theirs(**inputs.arguments, mems=[m.transpose(0, 1) for m in memory], use_mems=True).loss
    assert_same_gradients(ours, theirs, hf_format_of(CONFIG, "plm"), mean_loss(ours(batch, memory)), expected)


def test_a_target_that_sees_nothing_is_predicted_from_its_place_alone() -> None:
    ours, _ = models(torch.float32)
    batch = permuted([3])
    alone = replace(
        batch, order=torch.tensor([2, 3, 4]), target_positions=torch.tensor([0]), target_ids=torch.tensor([9])
    )
    logits = ours.logits(alone)
    changed = replace(alone, tokens=(alone.tokens + 1) % 101)
    assert logits.isfinite().all()
    assert torch.equal(ours.logits(changed), logits)
    ours(alone, None).terms[0].loss_sum.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_wrong_use_is_named() -> None:
    ours, _ = models(torch.float32)
    with pytest.raises(ModelError, match=r"\b10 tokens\b"):
        ours(permuted([24, 9]), ())
    with pytest.raises(ModelError, match=r"\b3 layers\b.*\b4 rows\b"):
        ours(permuted([24, 24]), ours(permuted(FULL), ()).memory)
    with pytest.raises(TrainingError, match=r"\border\b"):
        ours(make_batch(FULL, 101))


@pytest.mark.parametrize(("memory", "reuse"), [(384, 256), (0, 0)])
def test_configurations_travel_both_ways(memory: int, reuse: int) -> None:
    config = CONFIG.model_copy(update={"memory": memory, "reuse": reuse, "attention_dropout": 0.0})
    assert hf.from_json(hf.to_json(config)) == config
    for name, value in (("bi_data", True), ("same_length", True), ("clamp_len", 7), ("attn_type", "uni")):
        with pytest.raises(ModelError, match=name):
            hf.from_json(hf.to_json(config) | {name: value})


@torch.no_grad()
def test_predictions_with_memory_are_those_in_the_full_context() -> None:
    """The objective itself: targets in the second half, predicted from it and from the first in memory."""
    fields = {"reuse": 12, "memory": 12}
    model = random_weights(PlmConfig().build(CONFIG.model_copy(update=fields))).double().eval()
    whole = permuted([24, 24], segments=False)
    late = whole.positions >= 12
    keep = late[whole.target_positions]
    targets, ids = whole.target_positions[keep], whole.target_ids[keep]
    assert whole.order is not None
    order = torch.where(late, whole.order + 1, 0)
    whole = replace(whole, order=order, target_positions=targets, target_ids=ids)
    within = torch.cumsum(late, 0)[targets] - 1
    second = replace(_half(whole, late), order=order[late], target_positions=within, target_ids=ids)
    none = ids[:0]
    first = replace(_half(whole, ~late), target_positions=none, target_ids=none)
    memory = model(first).memory
    assert_close(model.logits(second, memory), model.logits(whole, None))
    found, expected = model(second, memory).terms[0], model(whole).terms[0]
    assert found.targets == expected.targets > 5
    assert_close(found.loss_sum, expected.loss_sum)
    assert abs(model(second).terms[0].loss_sum - expected.loss_sum) > 1e-5, "which needs the memory"


def _half(whole: Batch, chosen: Tensor) -> Batch:
    """Twelve tokens of each of two rows, as rows of their own that see all of themselves."""
    ends = torch.tensor([0, 12, 24], dtype=torch.int32)
    return replace(
        whole,
        tokens=whole.tokens[chosen],
        cu_seqlens=ends,
        max_length=12,
        positions=torch.arange(12).repeat(2),
        order=torch.zeros(24, dtype=torch.int64),
    )
