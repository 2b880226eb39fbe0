"""The loss `multiple_negatives`: sentence-transformers' forward pass and gradient cache, with our formula.

Theirs counts equal texts of a batch as negatives of each other, and the sampler by which they avoid it drops rows.
Ours leaves equal texts out of the denominator, by the same code as contrastive pretraining (`objectives.info_nce`).

Shapes: n rows of a batch, R rows of the data, G texts of a row, D width.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.objectives.info_nce import cached_loss, info_nce
from encoder_core.train.exchange import RankExamples
from launcher.after.embed.model import library
from launcher.after.embed.rows import TextColumns
from launcher.after.embed.settings import MultipleNegatives

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn


def ranking_loss(model: "SentenceTransformer", loss: MultipleNegatives, train: TextColumns) -> "nn.Module":
    """Return the module that the trainer calls with a batch's columns, and the indices of its rows in `train` as
    labels."""
    losses, texts_RG = library("losses"), _numbered(train)

    def mean_loss(columns: list[Tensor], rows_n: Tensor) -> Tensor:
        with torch.autocast(columns[0].device.type, enabled=False):
            own_nGD = F.normalize(torch.stack(columns, dim=1).float(), dim=-1)
            everyone, every_nGD = RankExamples.alone(own_nGD.detach())
            found = info_nce(
                every_nGD,
                every_nGD,
                everyone,
                texts_NG=texts_RG[rows_n.cpu()].to(rows_n.device),
                temperature=1 / loss.scale,
                bidirectional=loss.symmetric,
            )
        return cached_loss(own_nGD, found.gradient / len(own_nGD), found.loss.mean())

    class Ranking(losses.MultipleNegativesRankingLoss):  # type: ignore[misc, name-defined]
        def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
            return mean_loss(embeddings, labels)

    class CachedRanking(losses.CachedMultipleNegativesRankingLoss):  # type: ignore[misc, name-defined]
        def calculate_loss(self, reps: Any, labels: Any = None, *, with_backward: bool = False) -> Tensor:
            value = mean_loss([torch.cat(parts) for parts in reps], labels)
            if with_backward:
                value.backward()  # type: ignore[no-untyped-call]
            return value.detach() if with_backward else value

    made: nn.Module = (
        Ranking(model) if loss.mini_batch is None else CachedRanking(model, mini_batch_size=loss.mini_batch)
    )
    return made


def _numbered(rows: TextColumns) -> Tensor:
    """Return [R, G], a number for each text, the same for equal texts."""
    known = dict[str, int]()
    columns = [[known.setdefault(text, len(known)) for text in column] for column in rows.texts.values()]
    return torch.tensor(columns).t()
