"""Masked diffusion: a masking rate is drawn for each row, and each token of the row is hidden with this probability.

This is the forward process of Sahoo et al. 2024 (MDLM, arXiv 2406.07524, section 3.1, with the linear schedule alpha =
1 - t) and of Nie et al. 2025 (LLaDA, arXiv 2502.09992, section 2.1): t is uniform between 0 and 1, every token becomes
the mask token with probability t, independently of the others, and nothing else stands in its place.

Both papers' code draws no rate below 0.001, because the loss of a row is divided by its rate. Rates of different rows
are independent, as in LLaDA's code. MDLM's code spreads the rates of a batch evenly; here rows do not know their batch.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_service.rng import UINT32_RANGE, draw_uint32
from data_service.samples.masking import MaskableRows, RowMasking, purpose_key
from data_service.samples.samples import Samples

MIN_MASK_RATE = 1e-3  # smallest probability with which a row's tokens are hidden


class DiffusionMasking(RowMasking):
    """The masking of masked diffusion. It has no settings; rate and masks of a row change in each epoch."""

    kind: Literal["diffusion"] = "diffusion"

    @property
    def unit(self) -> Literal["token"]:
        """The unit of masking: single tokens."""
        return "token"

    def expected_target_count(self, length: int, maskable: int) -> float:
        return (1 + MIN_MASK_RATE) / 2 * maskable

    def mask(self, rows: MaskableRows) -> Samples:
        laid_out, units, slots = rows.rows, rows.units, rows.slots
        rates = mask_rate_by_row(
            draw_uint32(purpose_key(rows.key, "rates"), slots.first_row, slots.first_row + len(slots.draws_per_row))
        )
        draws = draw_uint32(purpose_key(rows.key, "hidden"), int(slots.edges[0]), int(slots.edges[-1]))
        hidden = draws < np.repeat(rates.astype(np.float64) * UINT32_RANGE, slots.draws_per_row)
        maskable = units.token_offsets(np.arange(int(units.edges[-1])))
        text = maskable[hidden[maskable]]
        positions = laid_out.token_indices(text, np.diff(np.searchsorted(text, laid_out.edges)))
        target_ids = laid_out.tokens[positions]
        laid_out.tokens[positions] = rows.vocabulary.mask
        counts = np.diff(units.edges).astype(np.int32)
        return Samples(laid_out.tokens, laid_out.offsets, positions, target_ids, rates=rates, maskable=counts)


def mask_rate_by_row(draws: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return [N] float32, masking rates uniform between `MIN_MASK_RATE` and 1, for [N] uniform 32-bit draws."""
    uniform = (draws.astype(np.float64) + 0.5) / UINT32_RANGE
    return (MIN_MASK_RATE + (1 - MIN_MASK_RATE) * uniform).astype(np.float32)
