"""What rooms pass to each other: token ids, blocks of them, and a type of settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Tokens = NDArray[np.uint16] | NDArray[np.uint32]

Share = Annotated[float, Field(ge=0, le=1)]

Level = Literal["word", "phrase", "entity"]
"""What a stored unit of text is: a word of the segmenter; or, from a lexicon, an entity, or a phrase or an entity. What
lies between a lexicon's entries is units of one token."""
LEVELS: tuple[Level, ...] = ("word", "phrase", "entity")


@dataclass(frozen=True)
class Block:
    """Whole documents, tokenised, in one tar sample of a shard: D documents, S sentences, T tokens.

    No special tokens inside: packing adds them.

    Attributes:
        tokens: [T] uint16 (vocabulary up to 65,536) or uint32.
        sentences: [S + 1] int64, token offsets; sentence j is tokens[sentences[j]:sentences[j+1]], not empty.
        documents: [D + 1] int64, sentence numbers; document k has those from documents[k] to
            documents[k + 1] - 1, at least one.
        units: of each level that was stored at the build, [ceil(T / 8)] uint8: bit 7 - t % 8 of byte t // 8 says
            whether a unit begins with token t. Without words here, the tokenizer's table says where words begin.
    """

    tokens: Tokens
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    units: Mapping[Level, NDArray[np.uint8]] = field(default_factory=dict)

    def begins(self, level: Level) -> NDArray[np.bool_] | None:
        """[T] bool, a unit of this level begins here; None where the level was not stored."""
        packed = self.units.get(level)
        return None if packed is None else np.unpackbits(packed, count=len(self.tokens)).view(np.bool_)
