"""Hidden states of every layer, one vector a text: what probes, similarity and isotropy are measured on.

Shapes: T tokens, N rows, D depths (the embeddings and each layer's output), H hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.catalogue import AnyEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from launcher.after.diagnose.frozen import Frozen
from launcher.runtime.recipe.evaluation import Pooling

Row = NDArray[np.int64]
"""Token ids of one row, special ones included."""

Pooled = Mapping[Pooling, NDArray[np.float32]]
"""By pooling: [D, N, H]."""

_TOKENS = 8192  # in a forward pass
_CLASS_SEGMENT = 2  # XLNet's, of the class token alone


def rows_of_texts(frozen: Frozen, texts: Sequence[str]) -> list[Row]:
    """Each text as a row with its special tokens; what is longer than the model takes is cut."""
    return rows_of_tokens(frozen, frozen.tokenizer.encode_batch(texts))


def rows_of_tokens(frozen: Frozen, texts: Sequence[NDArray[np.generic]]) -> list[Row]:
    """The same for texts that are token ids already."""
    cls, sep = frozen.tokenizer.special.cls, frozen.tokenizer.special.sep
    cut = [text[: frozen.length - 2].astype(np.int64) for text in texts]
    return [np.r_[text, sep, cls] if frozen.class_token_last else np.r_[cls, text, sep] for text in cut]


@torch.no_grad()
def pooled_states(frozen: Frozen, rows: Sequence[Row], poolings: Sequence[Pooling]) -> Pooled:
    """The states of every layer, pooled, in the order of `rows`; which rows share a pass depends on `rows` alone."""
    found = {pooling: list[Tensor]() for pooling in poolings}
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for group in _groups([rows[index] for index in order]):
        batch = _batch(frozen, group)
        states_DTH = torch.stack([state.float() for state in layer_states(frozen.encoder, batch)])
        for pooling in poolings:
            found[pooling].append(_pool(frozen, states_DTH, batch, pooling))
    back = np.argsort(np.array(order, dtype=np.int64))
    return {pooling: torch.cat(parts, 1).numpy()[:, back] for pooling, parts in found.items()}


def layer_states(encoder: AnyEncoder, batch: Batch) -> list[Float[Tensor, "tokens hidden"]]:
    """From the embeddings to the last layer's output, D of them."""
    if isinstance(encoder, TwoStreamEncoder):
        return [streams.content for streams in encoder.states(batch)]
    return list(encoder.states(batch))


def _groups(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Consecutive rows, as many together as make up a pass."""
    first = tokens = 0
    for index, row in enumerate(rows):
        if tokens and tokens + len(row) > _TOKENS:
            yield rows[first:index]
            first, tokens = index, 0
        tokens += len(row)
    if rows:
        yield rows[first:]


def _batch(frozen: Frozen, rows: Sequence[Row]) -> Batch:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.from_numpy(np.concatenate(rows))
    segments, none = torch.zeros_like(tokens), tokens[:0]
    if frozen.class_token_last:
        segments[lengths.cumsum(0) - 1] = _CLASS_SEGMENT
    return Batch(
        tokens=tokens,
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).int(),
        max_length=int(lengths.max()),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
        target_positions=none,
        target_ids=none,
        segments=segments,
    )


def _pool(
    frozen: Frozen, states_DTH: Float[Tensor, "depths tokens hidden"], batch: Batch, pooling: Pooling
) -> Float[Tensor, "depths rows hidden"]:
    ends, lengths = batch.cu_seqlens.long(), batch.cu_seqlens.diff()
    match pooling:
        case "cls":
            return states_DTH[:, ends[1:] - 1 if frozen.class_token_last else ends[:-1]]
        case "mean":
            row_T = torch.repeat_interleave(torch.arange(batch.rows), lengths)
            sums = torch.zeros(len(states_DTH), batch.rows, states_DTH.shape[2])
            return sums.index_add_(1, row_T, states_DTH) / lengths[:, None]
        case "max":
            parts = torch.split(states_DTH, lengths.tolist(), dim=1)
            return torch.stack([part.amax(1) for part in parts], dim=1)
        case _ as never:
            assert_never(never)
