"""A block: whole documents, tokenised, in one tar sample of a shard."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Block:
    """D whole documents, S sentences, T tokens. No special tokens inside: packing adds them.

    Attributes:
        tokens: [T] uint16 (vocabulary up to 65,536) or uint32.
        sentences: [S + 1] int64, token offsets; sentence j is tokens[sentences[j]:sentences[j+1]], not empty.
        documents: [D + 1] int64, sentence numbers; document k has those from documents[k] to
            documents[k + 1] - 1, at least one.
    """

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
