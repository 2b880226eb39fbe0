"""`Batch`: the input of a model. All rows' tokens lie end to end in flat tensors; only attention separates rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from encoder_core.random_draws import fingerprints, token_keys

_TOKEN_FIELDS = ("positions", "segments", "languages", "restarted")  # per token; copied for chosen or doubled rows
_ROW_FIELDS = ("pair_labels", "reversed_rows", "rates", "maskable")  # per row; copied for chosen rows


@dataclass(frozen=True)
class Batch:
    """A batch of R rows with T tokens and M targets.

    Attributes:
        tokens: [T] int64 input ids, row after row.
        cu_seqlens: [R + 1] int32, row i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        max_length: number of tokens in the longest row.
        positions: [T] int64, index of each token inside its row, from 0.
        target_positions: [M] int64, flat indices of the tokens to predict. M may be 0.
        target_ids: [M] int64, original ids at `target_positions`.
        segments: [T] int64, 0 for the first segment, 1 for the second and 2 for XLNet's classification token; None if
            the model has no token types.
        languages: [T] int64, index of each token's language in the model's language table; None without languages.
        restarted: [T] int64, positions for a table of absolute positions, if they differ from `positions`: in a row
            with a sentence and its translation they restart from 0 at the translation. None: `positions`.
        pair_labels: [R] int64, class of each pair of segments; None if pairs are not classified.
        order: [T] int64, factorisation order inside each row (permuted LM): a token's state may attend to tokens of
            the same or a lower number, its prediction only to tokens of a lower number. None for other objectives.
        reversed_rows: [R] bool, true for rows laid out from the last token to the first; None if there are none.
        numbers: [R] int64, number of each row in the global batch of the step; the row's random draws are hashed from
            it. None: rows are numbered from 0.
        group: number of rows of one example (contrastive training: query, positive, negatives): example i has rows i
            * group to (i + 1) * group - 1.
        kept: [K] int64, ascending flat indices of the tokens that may contribute to a loss; None: all. The others are
            placeholders for text that was removed from the corpus.
        pair_rows: [P] int64, ascending indices of the rows whose pairs are classified; None: all. The others have
            text that was removed from the corpus, so their labels may be wrong.
        rates: [R] float32, probability with which each token of a row's text was hidden (masked diffusion); None
            otherwise.
        maskable: [R] int64, number of tokens of each row that could be hidden; None without `rates`.
        causal: whether attention hides from each token the later tokens of its row, in every layer.
        corrupted: the rows' corrupted forms, which an encoder reads, for a decoder that predicts `tokens` (denoising);
            row i belongs to row i here. None for other objectives.
        host: the same batch in the host's memory, where it was made; None if it was not moved (`to`).
    """

    tokens: Int[Tensor, " tokens"]
    cu_seqlens: Int[Tensor, " rows_plus_1"]
    max_length: int
    positions: Int[Tensor, " tokens"]
    target_positions: Int[Tensor, " targets"]
    target_ids: Int[Tensor, " targets"]
    segments: Int[Tensor, " tokens"] | None = None
    languages: Int[Tensor, " tokens"] | None = None
    restarted: Int[Tensor, " tokens"] | None = None
    pair_labels: Int[Tensor, " rows"] | None = None
    order: Int[Tensor, " tokens"] | None = None
    reversed_rows: Bool[Tensor, " rows"] | None = None
    numbers: Int[Tensor, " rows"] | None = None
    group: int = 1
    kept: Int[Tensor, " kept"] | None = None
    pair_rows: Int[Tensor, " pairs"] | None = None
    rates: Float[Tensor, " rows"] | None = None
    maskable: Int[Tensor, " rows"] | None = None
    causal: bool = False
    corrupted: "Batch | None" = None
    host: "Batch | None" = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`. A copy to a GPU goes through pinned memory and may finish after the return."""
        if self.tokens.device == device:
            return self
        corrupted = None if self.corrupted is None else self.corrupted.to(device)
        return replace(self, host=self, corrupted=corrupted, **_map_tensors(self, lambda x: copy_to_device(x, device)))

    @property
    def on_host(self) -> "Batch":
        """The same batch in host memory: `host` if it is known, else a copy, which waits for the GPU."""
        return self.host or self.to(torch.device("cpu"))

    @property
    def rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def loss_token_count(self) -> int:
        """Number of tokens that may contribute to a loss; the divisor of a mean loss over all tokens."""
        return self.tokens.numel() if self.kept is None else self.kept.numel()

    def select_learnable(self, values_T: Tensor) -> Tensor:
        """Return [K, ...], the values at the tokens that may contribute to a loss (`kept`). `values_T`: [T, ...]."""
        return values_T if self.kept is None else values_T.index_select(0, self.kept)

    @property
    def unmasked_tokens(self) -> Int[Tensor, " tokens"]:
        """[T] ids before masking: the original id at each target, the input id elsewhere."""
        return self.tokens.index_copy(0, self.target_positions, self.target_ids)

    @property
    def absolute_positions(self) -> Int[Tensor, " tokens"]:
        """Positions for a table of absolute positions. Relative positions are differences of `positions` instead."""
        return self.positions if self.restarted is None else self.restarted

    @cached_property
    def random_keys(self) -> Int[Tensor, " tokens"]:
        """Key of each token, from which its random draws are hashed (`random_draws.token_keys`)."""
        numbers = self.numbers
        if numbers is None:
            numbers = torch.arange(self.rows, device=self.tokens.device)
        return token_keys(numbers, self.cu_seqlens.diff(), self.positions)

    @property
    def fingerprints(self) -> Int[Tensor, " rows"]:
        """[R] 63-bit hashes of the rows' tokens. Equal rows have equal hashes; other rows differ, bar collisions."""
        return fingerprints(self.tokens, self.positions, self.cu_seqlens.diff())


def _map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the tensor fields of `batch` by name, each changed by `change`."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: change(value) for name, value in found.items() if isinstance(value, Tensor)}


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy `x` from the host to `device`, or back. A copy to a GPU goes through pinned memory and may finish after
    the return; a copy to the host has finished by then.

    A copy from memory that is not pinned would wait until the GPU has finished all earlier work.
    """
    pinned = x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x
    asynchronous = device.type != "cpu"  # the CPU must not read a tensor before its copy has finished
    return pinned.to(device, non_blocking=asynchronous)


def select_rows(batch: Batch, rows: Int[Tensor, " chosen"]) -> Batch:
    """Return the rows with these indices (ascending, at least one) of a batch on the host.

    Rows keep their numbers and so their random draws. An example (`group` rows) must be chosen whole or not at all.
    """
    chosen_R = torch.zeros(batch.rows, dtype=torch.bool)
    chosen_R[rows] = True
    lengths_R = batch.cu_seqlens.diff()
    chosen_T = chosen_R.repeat_interleave(lengths_R)
    moved_T = chosen_T.cumsum(0) - 1  # new flat indices
    at_T, of_M = chosen_T.nonzero()[:, 0], chosen_T[batch.target_positions].nonzero()[:, 0]
    numbers = torch.arange(batch.rows) if batch.numbers is None else batch.numbers
    pairs, moved_R = batch.pair_rows, chosen_R.cumsum(0) - 1
    kept = None if batch.kept is None else moved_T[batch.kept[chosen_T[batch.kept]]]
    return replace(
        batch,
        tokens=batch.tokens[at_T],
        cu_seqlens=F.pad(lengths_R[rows].cumsum(0), (1, 0)).to(batch.cu_seqlens.dtype),
        max_length=int(lengths_R[rows].max()),
        target_positions=moved_T[batch.target_positions[of_M]],
        target_ids=batch.target_ids[of_M],
        numbers=numbers[rows],
        kept=kept,
        pair_rows=None if pairs is None else moved_R[pairs[chosen_R[pairs]]],
        **_select_entries(batch, (*_TOKEN_FIELDS, "order"), at_T),
        **_select_entries(batch, _ROW_FIELDS, rows),
        corrupted=None if batch.corrupted is None else select_rows(batch.corrupted, rows),
    )


def duplicate_rows(batch: Batch) -> Batch:
    """Return a batch in which each row appears twice, unmasked and without targets; both copies are one example.

    The two rows have different random draws: row number n becomes rows number 2 n and 2 n + 1.
    """
    lengths_R = batch.cu_seqlens.diff().repeat_interleave(2)
    cu_seqlens = F.pad(lengths_R.cumsum(0), (1, 0)).to(batch.cu_seqlens.dtype)
    begins_R = batch.cu_seqlens[:-1].repeat_interleave(2)
    total = 2 * batch.tokens.numel()
    moved_T = (begins_R - cu_seqlens[:-1]).repeat_interleave(lengths_R, output_size=total)
    at_T = torch.arange(total, device=batch.tokens.device) + moved_T
    numbers_R = torch.arange(batch.rows, device=at_T.device) if batch.numbers is None else batch.numbers
    none = batch.target_ids[:0]
    return Batch(
        tokens=batch.unmasked_tokens[at_T],
        cu_seqlens=cu_seqlens,
        max_length=batch.max_length,
        target_positions=none,
        target_ids=none,
        **_select_entries(batch, _TOKEN_FIELDS, at_T),
        numbers=torch.stack([2 * numbers_R, 2 * numbers_R + 1], 1).flatten(),
        group=2,
        causal=batch.causal,
        host=None if batch.host is None else duplicate_rows(batch.host),
    )


def batch_without_targets(tokens: Int[Tensor, " tokens"], lengths: Sequence[int]) -> Batch:
    """Return a batch without targets from rows of these lengths, which lie end to end in `tokens` on the host."""
    none, lengths_R = tokens[:0], torch.tensor(lengths, dtype=torch.int64)
    ends_R = lengths_R.cumsum(0)
    return Batch(
        tokens=tokens,
        cu_seqlens=F.pad(ends_R, (1, 0)).int(),
        max_length=max(lengths, default=0),
        positions=torch.arange(len(tokens)) - (ends_R - lengths_R).repeat_interleave(lengths_R),
        target_positions=none,
        target_ids=none,
    )


def idle_batch(device: torch.device) -> Batch:
    """Return a batch without rows, for a rank that has no microbatch left but must take part in all collectives."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    ends = torch.zeros(1, dtype=torch.int32, device=device)
    return Batch(
        tokens=none,
        cu_seqlens=ends,
        max_length=0,
        positions=none,
        target_positions=none,
        target_ids=none,
        segments=none,
        languages=none,
        pair_labels=none,
        order=none,
    )


def _select_entries(batch: Batch, names: Sequence[str], indices: Tensor) -> dict[str, Any]:
    """Return the named tensor fields of `batch`, each indexed with `indices`; None for fields that are None."""
    found = {name: getattr(batch, name) for name in names}
    return {name: None if values is None else values[indices] for name, values in found.items()}
