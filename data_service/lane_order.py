"""The order of a window whose rows go on from step to step (XLNet's recurrence): no permutation, but lanes.

A window of S steps is read as L lanes, each a stretch of S rows of the window's blocks laid end to end: lane i of
step s + 1 continues lane i of step s. With both directions, lanes 2j and 2j + 1 read the same stretch, the second
backward and from its last row to its first, so that it goes on too.

Where a lane comes to the end of a block it goes on with another, and where a window ends all lanes do: there its
memory is of other text, as it is wherever one document follows another. With windows of S steps that is one step in
S: `WindowSize` decides, and at 8,192 rows of 512 tokens its bound of memory allows 32.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.permutation import check_positions


@dataclass(frozen=True)
class LaneOrder:
    """`size` rows, a multiple of `lanes`, each `directions` (1 or 2) of which are one window of text.

    Position i holds row `at(i)`; a step's rows are `lanes` consecutive positions.
    """

    size: int
    lanes: int
    directions: int

    def at(self, position: int) -> int:
        return int(self.many(np.array([position]))[0])

    def many(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] int64 rows at `positions`, each in [0, size). Raises IndexError for a position outside."""
        check_positions(positions, self.size)
        steps = self.size // self.lanes
        step, lane = np.divmod(positions, self.lanes)
        stretch, direction = np.divmod(lane, self.directions)
        step = np.where(direction == 1, steps - 1 - step, step)
        rows: NDArray[np.int64] = (stretch * steps + step) * self.directions + direction
        return rows
