"""Types that all packages use: token ids, blocks of tokens, and types of settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Tokens = NDArray[np.uint16] | NDArray[np.uint32]  # token ids; uint16 if the vocabulary has at most 65,536

Share = Annotated[float, Field(ge=0, le=1)]

Level = Literal["word", "phrase", "entity"]
"""Kind of the units of text whose beginnings a corpus stores. `word`: a word of the segmenter. `entity`: an entity of a
lexicon. `phrase`: a phrase or an entity of a lexicon. Between a lexicon's entries every token is a unit."""
LEVELS: tuple[Level, ...] = ("word", "phrase", "entity")


@dataclass(frozen=True)
class Block:
    """A block of whole tokenised documents, stored as one tar sample of a shard: D documents, S sentences, T tokens.

    It holds no special tokens; packing adds them.

    Attributes:
        tokens: [T] uint16 (vocabulary up to 65,536) or uint32, token ids.
        sentences: [S + 1] int64, token offsets. Sentence j is tokens[sentences[j]:sentences[j+1]], which is not empty.
        documents: [D + 1] int64, sentence numbers. Document k has sentences documents[k] to documents[k + 1] - 1, at
            least one.
        units: [ceil(T / 8)] uint8 for each level that the build stored. Bit 7 - t % 8 of byte t // 8 says whether a
            unit begins with token t. If the level `word` is not stored, the tokenizer's table says where words begin.
        removed: [T] bool, tokens of removed documents, which the padding id has replaced; None if there are none.
    """

    tokens: Tokens
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    units: Mapping[Level, NDArray[np.uint8]] = field(default_factory=dict)
    removed: NDArray[np.bool_] | None = None

    def unit_starts(self, level: Level) -> NDArray[np.bool_] | None:
        """Return [T] bool, whether a unit of this level begins with each token; None if the level was not stored."""
        packed = self.units.get(level)
        return None if packed is None else np.unpackbits(packed, count=len(self.tokens)).view(np.bool_)
