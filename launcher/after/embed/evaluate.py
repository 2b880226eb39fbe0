"""Measures a model's vectors: similarity (STS) with sentence-transformers' own evaluator, retrieval as BEIR does.

Documents are ranked by the cosine and measured by trec_eval's rules. The retrieval evaluator of sentence-transformers
is not used, because it ignores grades, and ranks a document that has the query's own id.

Shapes: Q queries, D documents of a chunk, K documents of a ranking, W width of a vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from launcher.after.embed.model import (
    DOCUMENT_PROMPT,
    QUERY_PROMPT,
    import_sbert_module,
    load_model,
    show_encoding_progress,
    warn_of_truncation,
)
from launcher.after.embed.settings import EncodingSettings
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.tasks.examples import Examples, Retrieval, Sentences
from launcher.after.tasks.task import Task
from launcher.errors import TaskError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class VectorMeasureSettings(EncodingSettings):
    """The settings of measuring a checkpoint's vectors on a task.

    Attributes:
        split: split of the task; None: dev if there is one, else test.
        batch: number of texts in a batch; it changes the figures only by rounding errors.
    """

    split: str | None = None
    batch: PositiveInt = 32


def measure_checkpoint_vectors(pretrained: LocalModel, task: Task, settings: VectorMeasureSettings) -> dict[str, float]:
    """Return the task's metrics of a checkpoint's vectors. Raises the errors of `measure_task` and `load_model`."""
    examples = task.read(settings.split or ("dev" if "dev" in task.splits else "test"))
    return measure_task(load_model(pretrained, settings), task, examples, settings.batch)


def measure_task(
    model: "SentenceTransformer", task: Task, examples: Examples, batch_size: int = 32
) -> dict[str, float]:
    """Return the task's metrics, the main metric first, from 0 to 1 (correlations: from -1 to 1).

    Pairs with scores: Spearman's and Pearson's correlation of cosine and score. Retrieval: the metrics of
    `score_ranking`, averaged over all judged queries.

    Raises TaskError if the examples are of another kind, or all scores are equal; MissingPackage.
    """
    warn_of_truncation(model, _texts_to_encode(examples), task.name)
    match examples:
        case Sentences() if examples.second is not None and examples.labels.dtype == np.float64:
            with show_encoding_progress(model, f"measuring {task.name}", 2 * len(examples)):
                found = _measure_similarity(model, task, examples, batch_size)
        case Retrieval():
            if not examples.queries:
                raise TaskError(f"{task.name} has no query with a judgement", remedy="check its file of qrels")
            found = measure_retrieval(model, examples, batch_size)
        case _:
            raise TaskError(
                f"the task {task.name} is of the kind {task.kind}, which vectors alone cannot answer",
                remedy="name a task of the kind similarity or retrieval, or use maskfleet finetune",
            )
    return {metric: found[metric] for metric in task.metrics}


def _texts_to_encode(examples: Examples) -> Iterator[str]:
    match examples:
        case Sentences():
            yield from examples.first
            yield from examples.second or ()
        case Retrieval():
            yield from examples.documents.values()


def _measure_similarity(
    model: "SentenceTransformer", task: Task, examples: Sentences, batch_size: int
) -> dict[str, float]:
    scores = examples.labels.tolist()
    if len(set(scores)) < 2:
        raise TaskError(
            f"{task.name}: all scores are {scores[0]:g}, so nothing correlates with them",
            remedy="measure on a split with different scores",
        )
    evaluator = import_sbert_module("evaluation").EmbeddingSimilarityEvaluator(
        list(examples.first),
        list(examples.second or ()),
        scores,
        batch_size=batch_size,
        main_similarity="cosine",
        write_csv=False,
    )
    found = evaluator(model)
    # If all vectors are equal, the correlation is undefined and counts as 0.
    return {name: float(np.nan_to_num(found[f"{name}_cosine"], nan=0.0)) for name in ("spearman", "pearson")}


_RANKED_DOCUMENTS = 100  # documents that are ranked for a query: recall@100 needs no more
_CHUNK_DOCUMENTS = 1 << 14  # documents whose vectors are in memory at a time
_DCG_DISCOUNTS = 1 / np.log2(np.arange(2, 12))  # factors of the gains at ranks 1 to 10


def measure_retrieval(model: "SentenceTransformer", examples: Retrieval, batch_size: int) -> dict[str, float]:
    """Return the metrics of `score_ranking`, averaged over all judged queries."""
    rankings = rank_documents(model, examples, batch_size)
    found = [score_ranking(rankings[query], relevant) for query, relevant in examples.relevant.items()]
    return {metric: float(np.mean([one[metric] for one in found])) for metric in found[0]}


def score_ranking(ranking: Sequence[str], relevant: Mapping[str, int]) -> dict[str, float]:
    """Return one query's ndcg@10, with grades as gains, map@100, mrr@10 and recall@100; 0 if nothing is relevant.

    `ranking`: ids of documents, the best first. `relevant`: grades, 1 or more, of the relevant documents, by id.
    """
    gains = np.array([relevant.get(name, 0) for name in ranking[:_RANKED_DOCUMENTS]], np.float64)
    places = np.flatnonzero(gains) + 1
    ideal, every = sorted(relevant.values(), reverse=True)[:10], len(relevant) or 1
    best = np.array(ideal) @ _DCG_DISCOUNTS[: len(ideal)] or 1.0
    return {
        "ndcg@10": float(gains[:10] @ _DCG_DISCOUNTS[: len(gains)] / best),
        "map@100": float((np.arange(1, len(places) + 1) / places).sum()) / every,
        "mrr@10": float(1 / places[0]) if len(places) and places[0] <= 10 else 0.0,
        "recall@100": len(places) / every,
    }


def rank_documents(model: "SentenceTransformer", examples: Retrieval, batch_size: int) -> dict[str, list[str]]:
    """Return for each query the ids of the 100 nearest documents, the nearest first; of equally near documents, the
    greater id is first. A document with the query's own id is left out, unless it is judged relevant."""
    names = sorted(examples.documents, reverse=True)
    query_QW = encode_unit_vectors(model, list(examples.queries.values()), QUERY_PROMPT, batch_size)
    cosine_QK, place_QK = (np.empty((len(query_QW), 0), kind) for kind in (np.float32, np.int64))
    for begin in range(0, len(names), _CHUNK_DOCUMENTS):
        texts = [examples.documents[name] for name in names[begin : begin + _CHUNK_DOCUMENTS]]
        cosine_QD = query_QW @ encode_unit_vectors(model, texts, DOCUMENT_PROMPT, batch_size).T
        place_QD = np.broadcast_to(begin + np.arange(len(texts)), cosine_QD.shape)
        found = np.concatenate([cosine_QK, cosine_QD], 1), np.concatenate([place_QK, place_QD], 1)
        # Keep one document more than is ranked, because one may be the query's own.
        order_QK = np.argsort(-found[0], axis=1, kind="stable")[:, : _RANKED_DOCUMENTS + 1]
        cosine_QK, place_QK = (np.take_along_axis(one, order_QK, 1) for one in found)
    kept = examples.relevant
    return {
        query: [names[at] for at in places if names[at] != query or query in kept[query]][:_RANKED_DOCUMENTS]
        for query, places in zip(examples.queries, place_QK, strict=True)
    }


def encode_unit_vectors(
    model: "SentenceTransformer", texts: list[str], prompt_name: str, batch_size: int
) -> NDArray[np.float32]:
    """Return a vector of length 1 for each text, [texts, W]."""
    with show_encoding_progress(model, f"encoding each {prompt_name}", len(texts)):
        vectors: NDArray[np.float32] = model.encode(
            texts,
            batch_size=batch_size,
            prompt_name=prompt_name if prompt_name in model.prompts else None,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
    return vectors
