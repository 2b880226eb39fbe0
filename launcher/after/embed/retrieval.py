"""Ranks documents for queries by the cosine of their vectors, and measures rankings by trec_eval's rules, as BEIR does.

sentence-transformers' evaluator counts every judgement as 1, leaves a query's own document in the ranking, and divides
average precision by the depth where more documents are relevant.

Shapes: Q queries, D documents of a chunk, X queries at a time, W width of a vector.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launcher.after.embed.model import DOCUMENT, QUERY, SIMILARITIES, nearest, unit_vectors
from launcher.after.tasks.examples import Retrieval

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_DEPTH = 100  # documents of a ranking
_CHUNK = 50_000  # documents whose vectors are in memory at a time
_DISCOUNTS = 1 / np.log2(np.arange(2, 12))


def measure_retrieval(model: "SentenceTransformer", examples: Retrieval, batch: int) -> dict[str, float]:
    """Return the means over all judged queries of the measures of `score_ranking`."""
    found = [
        score_ranking(ranking, examples.relevant[query])
        for query, ranking in rank(model, examples, batch).items()
    ]
    return {metric: float(np.mean([one[metric] for one in found])) for metric in found[0]}


def score_ranking(ranking: Sequence[str], relevant: Mapping[str, int]) -> dict[str, float]:
    """Return trec_eval's measures of one query: ndcg@10, whose gains are the grades, map@100, mrr@10 and recall@100.

    `ranking`: ids of documents, the best first. `relevant`: grades, 1 or more, of the relevant ones; all are 0 if there
    is none.
    """
    gains = np.array([relevant.get(name, 0) for name in ranking[:_DEPTH]], np.float64)
    hits, first = gains > 0, next((n for n, gain in enumerate(gains[:10]) if gain), None)
    ideal = np.array(sorted(relevant.values(), reverse=True)[:10])
    best, every = float(ideal @ _DISCOUNTS[: len(ideal)]) or 1.0, len(relevant) or 1
    precisions = hits.cumsum() / np.arange(1, len(hits) + 1)
    return {
        "ndcg@10": float(gains[:10] @ _DISCOUNTS[: len(gains)]) / best,
        "map@100": float(precisions[hits].sum()) / every,
        "mrr@10": 0.0 if first is None else 1 / (first + 1),
        "recall@100": float(hits.sum()) / every,
    }


def rank(model: "SentenceTransformer", examples: Retrieval, batch: int) -> dict[str, list[str]]:
    """Return the ids of the 100 documents nearest to each query, the nearest first; of equally near ones, the greater
    id. A document with the query's own id is the query itself and left out, unless it is judged relevant, as in no
    published task. Prompts `query` and `document` of the model are put before texts.
    """
    names = sorted(examples.documents, reverse=True)
    query_QW = unit_vectors(model, list(examples.queries.values()), QUERY, batch)
    best = [(np.empty(0, np.float32), np.empty(0, np.int64))] * len(query_QW)
    for begin in range(0, len(names), _CHUNK):
        texts = [examples.documents[name] for name in names[begin : begin + _CHUNK]]
        text_DW = unit_vectors(model, texts, DOCUMENT, batch)
        at_a_time = max(1, SIMILARITIES // len(texts))
        for start in range(0, len(query_QW), at_a_time):
            cosine_XD = query_QW[start : start + at_a_time] @ text_DW.T
            for number, cosine_D in enumerate(cosine_XD, start):
                best[number] = _merged(best[number], cosine_D, begin)
    found = zip(examples.queries, ([names[place] for place in places] for _, places in best), strict=True)
    return {
        query: [name for name in those if name != query or name in examples.relevant[query]][:_DEPTH]
        for query, those in found
    }


def _merged(
    kept: tuple[NDArray[np.float32], NDArray[np.int64]], cosine_D: NDArray[np.float32], begin: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return cosines and places of the nearest of those kept and a chunk that begins at place `begin`."""
    cosines = np.concatenate([kept[0], cosine_D])
    places = np.concatenate([kept[1], begin + np.arange(len(cosine_D))])
    chosen = nearest(cosines, _DEPTH + 1)  # one may be the query's own
    return cosines[chosen], places[chosen]
