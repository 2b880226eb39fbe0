"""Rankings of documents by the cosine of vectors, measured by trec_eval's rules, as BEIR does. The evaluator of
sentence-transformers knows no grades, and ranks a query's own document.

Shapes: Q queries, D documents of a chunk, K of a ranking, W width of a vector.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launcher.after.embed.model import DOCUMENT, QUERY, show_progress
from launcher.after.tasks.examples import Retrieval

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_RANKED_DOCUMENTS = 100  # documents of a ranking
_CHUNK_DOCUMENTS = 1 << 14  # documents whose vectors are in memory at a time
_DISCOUNTS = 1 / np.log2(np.arange(2, 12))


def measure_retrieval(model: "SentenceTransformer", examples: Retrieval, batch: int) -> dict[str, float]:
    """Return the means over all judged queries of the measures of `score_ranking`."""
    rankings = rank(model, examples, batch)
    found = [score_ranking(rankings[query], relevant) for query, relevant in examples.relevant.items()]
    return {metric: float(np.mean([one[metric] for one in found])) for metric in found[0]}


def score_ranking(ranking: Sequence[str], relevant: Mapping[str, int]) -> dict[str, float]:
    """Return one query's ndcg@10, with grades as gains, map@100, mrr@10 and recall@100; 0 if nothing is relevant.

    `ranking`: ids of documents, the best first. `relevant`: grades, 1 or more, of the relevant ones.
    """
    gains = np.array([relevant.get(name, 0) for name in ranking[:_RANKED_DOCUMENTS]], np.float64)
    places = np.flatnonzero(gains) + 1
    ideal, every = sorted(relevant.values(), reverse=True)[:10], len(relevant) or 1
    best = np.array(ideal) @ _DISCOUNTS[: len(ideal)] or 1.0
    return {
        "ndcg@10": float(gains[:10] @ _DISCOUNTS[: len(gains)] / best),
        "map@100": float((np.arange(1, len(places) + 1) / places).sum()) / every,
        "mrr@10": float(1 / places[0]) if len(places) and places[0] <= 10 else 0.0,
        "recall@100": len(places) / every,
    }


def rank(model: "SentenceTransformer", examples: Retrieval, batch: int) -> dict[str, list[str]]:
    """Return the ids of the 100 documents nearest to each query, the nearest first; of equally near ones, the greater
    id. A document with the query's own id is left out, unless it is judged relevant, as in no published task.
    """
    names = sorted(examples.documents, reverse=True)
    query_QW = unit_vectors(model, list(examples.queries.values()), QUERY, batch)
    cosine_QK, place_QK = (np.empty((len(query_QW), 0), kind) for kind in (np.float32, np.int64))
    for begin in range(0, len(names), _CHUNK_DOCUMENTS):
        texts = [examples.documents[name] for name in names[begin : begin + _CHUNK_DOCUMENTS]]
        cosine_QD = query_QW @ unit_vectors(model, texts, DOCUMENT, batch).T
        place_QD = np.broadcast_to(begin + np.arange(len(texts)), cosine_QD.shape)
        found = np.concatenate([cosine_QK, cosine_QD], 1), np.concatenate([place_QK, place_QD], 1)
        order_QK = np.argsort(-found[0], axis=1, kind="stable")[
            :, : _RANKED_DOCUMENTS + 1
        ]  # one may be the query's own
        cosine_QK, place_QK = (np.take_along_axis(one, order_QK, 1) for one in found)
    kept = examples.relevant
    return {
        query: [names[at] for at in places if names[at] != query or query in kept[query]][:_RANKED_DOCUMENTS]
        for query, places in zip(examples.queries, place_QK, strict=True)
    }


def unit_vectors(
    model: "SentenceTransformer", texts: list[str], prompt: str, batch: int
) -> NDArray[np.float32]:
    """Return a vector of length 1 for each text, [texts, W]."""
    with show_progress(model, f"reading {prompt}s", len(texts)):
        vectors: NDArray[np.float32] = model.encode(
            texts,
            batch_size=batch,
            prompt_name=prompt if prompt in model.prompts else None,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
    return vectors
