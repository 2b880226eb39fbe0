"""The host half of a made-up objective, as a newcomer writes it: chosen tokens of a row change places.

`tests/architecture/test_habit_of_an_objective.py` copies it to data_service/samples/.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from data_service.rng import stream_key
from data_service.samples.masking import FixedRateMasking, MaskableRows
from data_service.samples.samples import Samples
from data_service.samples.selection import select


class TokenShuffling(FixedRateMasking):
    """Each chosen token moves to the place of the one before it, the first to that of the last."""

    kind: Literal["shuffled"] = "shuffled"
    rate: float = Field(default=0.15, gt=0, le=0.8)

    @property
    def unit(self) -> Literal["token"]:
        return "token"

    def mask(self, rows: MaskableRows) -> Samples:
        units, tokens = rows.units, rows.rows.tokens
        counts = np.ceil(self.rate * np.diff(units.edges)).astype(np.int64)
        chosen = select(units, counts, rows.slots, stream_key(rows.key.hex(), "targets"))
        positions = rows.rows.places(units.text(np.flatnonzero(chosen)), counts)
        ids = tokens[positions]
        last = np.cumsum(counts)[counts > 0] - 1
        following = np.arange(1, len(positions) + 1)
        following[last] -= counts[counts > 0]
        tokens[positions] = ids[following]
        return Samples(tokens, rows.rows.offsets, positions, ids)
