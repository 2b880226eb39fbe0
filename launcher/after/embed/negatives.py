"""Hard negatives: texts that a checkpoint takes for the answer to a query, and that are the answers to others.

Between two phases of contrastive training, the checkpoint of the first ranks all positives of a corpus of pairs for
each query, and the nearest that are not its own become the negatives of the next (ANCE: Xiong et al. 2021, arXiv
2007.00808). A text that is as near as the positive is often an answer that nobody marked. So a negative's cosine must
be below a share of the positive's (NV-Retriever: Moreira et al. 2024, arXiv 2407.15831, TopK-PercPos, 0.95).

What is found is a function of the checkpoint's bits, the pairs in their order, and the settings; vectors of one machine
and one batch size are equal to the last bit. Of equally near texts the first one in the input is taken.

Shapes: Q queries, P positives, W width of a vector.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import InputListing
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.store.open import open_file
from launcher.after.embed.model import DOCUMENT, QUERY, counting, say_what_is_cut
from launcher.after.embed.settings import MiningSettings
from launcher.errors import TaskError
from launcher.progress import work

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_LOG = logging.getLogger(__name__)
_SIMILARITIES = 1 << 24  # that are in memory at a time: 64 MiB


@dataclass(frozen=True)
class Example:
    """A query, its positive, and negatives, the nearest first."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()

    @property
    def line(self) -> bytes:
        """The example as a line of JSON, as `corpus build --texts pairs` reads it."""
        fields = {"query": self.query, "positive": self.positive, "negatives": list(self.negatives)}
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def read_examples(listing: InputListing, options: BuildOptions) -> list[Example]:
    """Return the queries and positives of the inputs, as `corpus build --texts pairs` reads them; without
    those of which one is blank.

    Raises InputError if a record has none, and StoreError.
    """
    found: list[Example] = []
    with work("reading pairs", unit="examples") as now:
        for split in plan_splits(listing.files, options):
            for record in read_documents(split, options):
                if not record.blank:
                    found.append(Example(record.text, record.others[0]))
                now.advance()
    return found


def require_new(out: str) -> None:
    """Raise TaskError if there is a file `out` already. Call this before the search."""
    store, name = open_file(out)
    if store.size(name) is not None:
        raise TaskError(f"{out} exists already", remedy="name a new file, or delete this one")


def write_examples(examples: Sequence[Example], out: str) -> None:
    """Write the examples to the file or s3:// URI `out`. Raises TaskError if it exists, and StoreError."""
    require_new(out)
    store, name = open_file(out)
    store.put(name, b"".join(example.line for example in examples))


def with_negatives(
    model: "SentenceTransformer", examples: Sequence[Example], settings: MiningSettings
) -> list[Example]:
    """Return the examples with `settings.negatives` negatives each, without those that have fewer.

    A query's own positives, in any of the examples, and a text that is the query itself are never its negatives.
    Prompts `query` and `document` of the model are put before texts.

    Raises:
        TaskError: no example has as many.
    """
    queries = list(dict.fromkeys(example.query for example in examples))
    texts = list(dict.fromkeys(example.positive for example in examples))
    say_what_is_cut(model, texts, "positives")
    query_QW = unit_vectors(model, queries, QUERY, settings.batch)
    text_PW = unit_vectors(model, texts, DOCUMENT, settings.batch)
    at_query = {query: place for place, query in enumerate(queries)}
    at_text = {text: place for place, text in enumerate(texts)}
    asked = [(at_query[example.query], at_text[example.positive]) for example in examples]
    own = [{at_text[query]} if query in at_text else set() for query in queries]
    for query, positive in asked:
        own[query].add(positive)
    found = _searched(query_QW, text_PW, asked, own, settings)
    kept = [
        Example(example.query, example.positive, tuple(texts[place] for place in places))
        for example, places in zip(examples, found, strict=True)
        if len(places) == settings.negatives
    ]
    _say_what_is_left_out(len(examples), len(kept), settings)
    return kept


def _say_what_is_left_out(examples: int, kept: int, settings: MiningSettings) -> None:
    lacking = f"fewer than {settings.negatives} texts below {settings.share:g} of the positive's cosine"
    if not kept:
        raise TaskError(
            f"every example has {lacking}",
            remedy="ask for fewer negatives, give more pairs, or raise the share",
        )
    if kept < examples:
        _LOG.warning("%s of %s examples are left out: %s", f"{examples - kept:,}", f"{examples:,}", lacking)


def unit_vectors(
    model: "SentenceTransformer", texts: list[str], prompt: str, batch: int
) -> Float[np.ndarray, "texts width"]:
    """Return a vector of length 1 for each text."""
    with counting(model, f"reading {prompt}s", len(texts)):
        vectors: NDArray[np.float32] = model.encode(
            texts,
            batch_size=batch,
            prompt_name=prompt if prompt in model.prompts else None,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
    return vectors


def _searched(
    query_QW: NDArray[np.float32],
    text_PW: NDArray[np.float32],
    asked: Sequence[tuple[int, int]],
    own: Sequence[set[int]],
    settings: MiningSettings,
) -> Iterator[list[int]]:
    """Yield the places of each example's negatives. `asked`: query and positive of each; `own`: what is no negative
    of each query.
    """
    at_a_time = max(1, _SIMILARITIES // len(text_PW))
    with work("searching negatives", len(asked), "examples") as now:
        for start in range(0, len(asked), at_a_time):
            some = asked[start : start + at_a_time]
            cosine_XP = query_QW[[query for query, _ in some]] @ text_PW.T
            for (query, positive), cosine_P in zip(some, cosine_XP, strict=True):
                bound = cosine_P[positive] - (1 - settings.share) * abs(cosine_P[positive])
                cosine_P[cosine_P >= bound] = -np.inf
                cosine_P[list(own[query])] = -np.inf
                yield _nearest(cosine_P, settings.negatives)
            now.advance(len(some))


def _nearest(cosine_P: Float[np.ndarray, " texts"], count: int) -> list[int]:
    """Return the places of the `count` largest, the largest first and of equal ones the first; -inf does not count.

    They are fewer if not as many count.
    """
    count = min(count, int(np.isfinite(cosine_P).sum()))
    if not count:
        return []
    least = np.partition(cosine_P, -count)[-count]
    places = np.flatnonzero(cosine_P >= least)
    nearest: list[int] = places[np.argsort(-cosine_P[places], kind="stable")][:count].tolist()
    return nearest
