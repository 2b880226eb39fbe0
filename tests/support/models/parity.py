"""What equality with transformers needs: rows flat and padded, weights across by the key tables, the tolerances."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder_core.batch import Batch, batch_without_targets
from encoder_core.families.catalogue import HfFormat, ModelConfig, hf_format_of
from encoder_core.layers.any_encoder import AnyEncoder
from encoder_core.layers.rows import Rows
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.modules.losses import LossSums
from encoder_core.objectives.modules.multitask import MultitaskModel

Model = TypeVar("Model", bound=nn.Module)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
GRADIENT_TOLERANCE = 1e-8  # absolute, in fp64


@torch.no_grad()
def random_weights(model: Model, seed: int = 0) -> Model:
    """Every parameter normal(0, 0.1), biases and norms included, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.1, generator=generator)
    return model


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Largest difference relative to the largest expected value, within 1e-5 in fp32 and 1e-10 in fp64."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= TOLERANCE[expected.dtype], f"relative difference {difference:.2e}"


@torch.no_grad()
def copy_from(theirs: nn.Module, ours: nn.Module, their: HfFormat) -> None:
    """Their weights into our model. Folded tables are handled as on import."""
    state, parameters = theirs.state_dict(), dict(ours.named_parameters())
    matched = their.table.match(state, their.layers, "their model")
    assert set(matched) == set(parameters)
    for name, tensor in their.table.unpack(state.__getitem__, matched, their.layers).items():
        parameters[name].copy_(tensor)
    for fold in their.table.folds:
        parameters[fold.ours].add_(state[fold.theirs][0])


@torch.no_grad()
def copy_into(theirs: nn.Module, ours: nn.Module, their: HfFormat) -> None:
    """Our weights into their model, folded tables zero, as on export."""
    parameters = dict(ours.named_parameters())
    assert set(their.table.their_names(their.layers)) == set(parameters)
    state = their.table.pack(parameters.__getitem__, their.layers)
    for fold in their.table.folds:
        state[fold.theirs] = torch.zeros_like(theirs.state_dict()[fold.theirs])
    outcome = theirs.load_state_dict(state, strict=False)
    assert not outcome.unexpected_keys
    assert set(outcome.missing_keys) <= {*their.table.tied, *their.table.zero}


SPECIAL = 8  # ids below are special tokens, padding among them


def make_batch(lengths: list[int], vocab: int, *, share: float = 0.3, segments: bool = False, seed: int = 0) -> Batch:
    """Rows of these lengths, about `share` of their tokens targets (one at least)."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    chosen = torch.rand(count, generator=generator) < share
    chosen[count // 2] = True
    targets = chosen.nonzero().flatten()
    second = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    return replace(
        batch_without_targets(torch.randint(SPECIAL, vocab, (count,), generator=generator), lengths),
        target_positions=targets,
        target_ids=torch.randint(SPECIAL, vocab, (len(targets),), generator=generator),
        segments=second.long() if segments else None,
        pair_labels=torch.randint(2, (len(lengths),), generator=generator) if segments else None,
    )


@dataclass(frozen=True)
class Padded:
    """The same batch as rectangles [R, L]; `labels` are -100 off the targets."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor

    def flat(self, x: Tensor) -> Tensor:
        """[R, L, ...] to [T, ...], padding left out."""
        return x[self.attention_mask.bool()]


def pad(batch: Batch, pad_id: int) -> Padded:
    lengths = batch.cu_seqlens.diff().tolist()
    labels = torch.full_like(batch.tokens, -100)
    labels[batch.target_positions] = batch.target_ids
    segments = batch.segments if batch.segments is not None else torch.zeros_like(batch.tokens)

    def rectangle(x: Tensor, fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True, padding_value=fill)

    return Padded(
        rectangle(batch.tokens, pad_id),
        rectangle(torch.ones_like(batch.tokens), 0),
        rectangle(segments, 0),
        rectangle(labels, -100),
    )


@dataclass(frozen=True)
class Permuted:
    """A batch as transformers' XLNet takes it: rectangles, and which of its [R, most targets] predictions are real."""

    arguments: dict[str, Tensor]
    real: Tensor
    flat: Callable[[Tensor], Tensor]


def permuted_inputs(batch: Batch, dtype: torch.dtype, pad_id: int) -> Permuted:
    """A target does not see its own token, and everything else sees what comes no later."""
    rectangle = pad(batch, pad_id)
    lengths, longest = batch.cu_seqlens.diff().tolist(), batch.max_length
    orders = torch.zeros(batch.rows, longest, dtype=torch.int64)
    counts = [((batch.target_positions >= a) & (batch.target_positions < a + n)).sum().item()
              for a, n in zip(batch.cu_seqlens.tolist(), lengths, strict=False)]  # fmt: skip
    mapping = torch.zeros(batch.rows, max(counts), longest, dtype=dtype)
    labels = torch.full((batch.rows, max(counts)), -100)
    real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    hidden = torch.zeros(batch.rows, longest, longest, dtype=dtype)
    done = 0
    for row, (start, length, count) in enumerate(zip(batch.cu_seqlens.tolist(), lengths, counts, strict=False)):
        assert batch.order is not None
        orders[row, :length] = batch.order[start : start + length]
        own = batch.target_positions[done : done + count] - start
        mapping[row, torch.arange(count), own] = 1
        labels[row, :count] = batch.target_ids[done : done + count]
        is_target = torch.zeros(longest, dtype=torch.bool)
        is_target[own] = True
        # As data_utils.py has it: a target may see lower orders, anything else its own order too.
        limit = torch.where(is_target, orders[row], orders[row] + 1)
        hidden[row] = (limit[:, None] <= orders[row][None, :]).to(dtype)
        done += count
    arguments = {
        "input_ids": rectangle.input_ids,
        "attention_mask": rectangle.attention_mask.to(dtype),
        "perm_mask": hidden,
        "target_mapping": mapping,
        "labels": labels,
    }
    if batch.segments is not None:
        arguments["token_type_ids"] = rectangle.token_type_ids
    return Permuted(arguments, real, rectangle.flat)


def rows_of(lengths: list[int]) -> Rows:
    """Rows of these lengths, for layers that are called by themselves."""
    batch = batch_without_targets(torch.zeros(sum(lengths), dtype=torch.int64), lengths)
    return Rows(batch.cu_seqlens, batch.positions, batch.max_length)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter; fails where one has none."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, missing
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def states_of(encoder: AnyEncoder, batch: Batch) -> list[Tensor]:
    """[T, H] each, from the embeddings to the last layer."""
    assert not isinstance(encoder, TwoStreamEncoder)
    return list(encoder.states(batch))


def assert_same_masked_outputs(ours: MultitaskModel, theirs: nn.Module, batch: Batch, pad_id: int) -> None:
    """Hidden states of all layers, logits and loss of masked language models of the same weights."""
    padded = pad(batch, pad_id)
    expected = theirs(
        padded.input_ids,
        attention_mask=padded.attention_mask,
        labels=padded.labels,
        output_hidden_states=True,
    )
    states = states_of(ours.encoder, batch)
    assert len(states) == len(expected.hidden_states)
    for state, hidden in zip(states, expected.hidden_states, strict=True):
        assert_close(state, padded.flat(hidden))
    logits = padded.flat(expected.logits)[batch.target_positions]
    assert_close(ours.logits(batch), logits)
    result = ours(batch)
    loss = mean_loss(result)
    assert_close(loss, masked_loss(expected.logits, padded.labels))
    assert_close(loss.float(), expected.loss.float())
    assert result.metrics["mlm_correct"] == (logits.argmax(-1) == batch.target_ids).sum()


def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Without the rounding to fp32 of some of their classes' own."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def assert_same_masked_gradients(ours: MultitaskModel, theirs: nn.Module, batch: Batch, config: ModelConfig) -> None:
    """Of the mean loss of masked language models in fp64, after our weights were copied into theirs."""
    their = hf_format_of(config)
    copy_into(theirs, ours, their)
    padded = pad(batch, config.pad_id)
    logits = theirs(padded.input_ids, attention_mask=padded.attention_mask).logits
    assert_same_gradients(ours, theirs, their, mean_loss(ours(batch)), masked_loss(logits, padded.labels))


def mean_loss(losses: LossSums) -> Tensor:
    """The sum of the terms' means."""
    return torch.stack([term.loss_sum / term.targets for term in losses.terms]).sum()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, their: HfFormat, loss: Tensor, expected: Tensor) -> None:
    """Of our loss and of theirs, for every parameter."""
    loss.backward()
    expected.backward()
    their_parameters, names = dict(theirs.named_parameters()), their.table.their_names(their.layers)
    assert set(names) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        wanted = their_parameters[names[name]].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=GRADIENT_TOLERANCE, msg=name)
