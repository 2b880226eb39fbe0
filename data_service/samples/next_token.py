"""The host half of next-token prediction: nothing is hidden, and nearly every token is predicted from those before it.

Targets are all tokens of the text that have a token of the same stretch of text before them in their row. A row's first
token has none there, nor has the first token after a separator: of a document, or of a second segment. Special tokens
are never targets: where a row ends is a matter of its length, not of the text.

Nothing is drawn, so the rows of all epochs are the same. Rows are marked as causal (`Samples.causal`): attention must
then hide from each token the later ones, among which is what it predicts. Documents that share a row see each other as
they do under masks: a later one sees the earlier.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_service.samples.masking import DeterministicMasking
from data_service.samples.packing import LaidOutRows
from data_service.samples.samples import Samples


class NextToken(DeterministicMasking):
    """Next-token prediction (Radford et al., 2018, section 3.1), for encoders as in Gisserot-Boukhlef et al. (2025,
    arXiv 2507.00994).
    """

    kind: Literal["clm"] = "clm"

    def expected_target_count(self, length: int, maskable: int) -> float:
        """Return the number of targets in a row of one stretch with `maskable` tokens that are not special."""
        return float(max(0, maskable - 1))

    def max_target_count(self, tokens: int) -> float:
        """Return the largest number of targets in a row of `tokens` tokens."""
        return float(tokens)


def next_token_samples(rows: LaidOutRows, excluded_offsets: NDArray[np.int64]) -> Samples:
    """Return the rows with their targets. `excluded_offsets`: offsets in the text of tokens that are never targets."""
    follows = np.ones(int(rows.edges[-1]), dtype=np.bool_)
    for without in (rows.edges[:-1], rows.separators, excluded_offsets):
        follows[without] = False
    positions = rows.marked_token_indices(follows)
    causal = np.ones(len(rows.offsets) - 1, dtype=np.bool_)
    return Samples(rows.tokens, rows.offsets, positions, rows.tokens[positions], causal=causal)
