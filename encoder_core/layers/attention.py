"""Multi-head self-attention over flat tokens. Only the kernel (`Attend`) knows about rows; see `kernels.py`.

Shapes: T tokens, H hidden, N heads, D head width (H = N * D).
"""

from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.layers.kernels import Attend
from encoder_core.layers.rows import Rows


class SelfAttention(nn.Module):
    """Scaled dot-product self-attention with its four projections ("Attention Is All You Need", section 3.2).

    The projections are separate parameters, as in the published models, so that an optimizer with a trust
    ratio per parameter (LAMB) sees the matrices that its authors saw.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, attend: Attend) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attend = attend
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        q_TND, k_TND, v_TND = (
            projection(x_TH).unflatten(-1, (self.heads, -1))
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        context_TND: Tensor = self.attend(q_TND, k_TND, v_TND, rows, dropout)
        output_TH: Tensor = self.output(context_TND.flatten(-2))
        return output_TH
