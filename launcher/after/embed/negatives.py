"""Mines hard negatives: texts that a checkpoint ranks near a query although they answer other queries.

This is done between two phases of contrastive training. The first phase's checkpoint ranks all positives of a corpus
of pairs for each query. The nearest texts that are not its positives become its negatives in the next phase (ANCE:
Xiong et al. 2021, arXiv 2007.00808). A text as near as the positive is often an unmarked answer, so a negative's cosine
must be below a share of the positive's (NV-Retriever: Moreira et al. 2024, arXiv 2407.15831, TopK-PercPos, 0.95).
sentence-transformers does the search.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import InputListing
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.store.open import open_store_of_file
from launcher.after.embed.model import DOCUMENT_PROMPT, QUERY_PROMPT, warn_of_truncation
from launcher.after.embed.settings import MiningSettings
from launcher.errors import EVALUATE_EXTRA, TaskError, import_optional
from launcher.progress import work

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_LOG = logging.getLogger(__name__)
_IMPORT_PURPOSE = "maskfleet embed negatives"  # what needs a package, for the message if it is not installed
_MIN_MARGIN = 1e-6  # sentence-transformers treats a margin of 0 as no margin
_SEARCHED_RANKS = 1000  # number of texts nearest to a query, from which its negatives are taken


@dataclass(frozen=True)
class PairExample:
    """A query, its positive, and its negatives, the nearest first."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()

    @property
    def json_line(self) -> bytes:
        """The example as a line of JSON, as `corpus build --texts pairs` reads it."""
        fields = {"query": self.query, "positive": self.positive, "negatives": list(self.negatives)}
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def read_pair_examples(listing: InputListing, options: BuildOptions) -> list[PairExample]:
    """Return the queries and positives of the inputs, as `corpus build --texts pairs` reads them, without pairs that
    have a blank text.

    Raises InputError if a record has no query or no positive, and StoreError.
    """
    found: list[PairExample] = []
    with work("reading pairs", unit="examples") as now:
        for split in plan_splits(listing.files, options):
            for record in read_documents(split, options):
                if not record.is_blank:
                    found.append(PairExample(record.text, record.others[0]))
                now.advance()
    return found


def require_new_file(out: str) -> None:
    """Raise TaskError if the file `out` exists already. Call this before the search."""
    store, name = open_store_of_file(out)
    if store.size(name) is not None:
        raise TaskError(f"{out} exists already", remedy="name a new file, or delete this one")


def write_pair_examples(examples: Sequence[PairExample], out: str) -> None:
    """Write the examples to the file or s3:// URI `out`. Raises TaskError if the file exists already; StoreError."""
    require_new_file(out)
    store, name = open_store_of_file(out)
    store.put(name, b"".join(example.json_line for example in examples))


def mine_negatives(
    model: "SentenceTransformer", examples: Sequence[PairExample], settings: MiningSettings
) -> list[PairExample]:
    """Return the examples with `settings.negatives` negatives each; examples for which fewer are found are left out.

    A text that any example has as a positive of the query is never its negative. The model's prompts `query` and
    `document` are put before the texts. Raises TaskError if no example has enough negatives.
    """
    pairs = list(dict.fromkeys((example.query, example.positive) for example in examples))
    warn_of_truncation(model, [positive for _, positive in pairs], "positives")
    columns = {"query": [query for query, _ in pairs], "positive": [positive for _, positive in pairs]}
    searched = min(len(set(columns["positive"])), _SEARCHED_RANKS)
    if settings.negatives > searched:
        raise TaskError(
            f"{settings.negatives} negatives are wanted for each query, but only {searched} texts are searched",
            remedy="use a smaller --negatives, or give more pairs",
        )
    prompts = {name: name if name in model.prompts else None for name in (QUERY_PROMPT, DOCUMENT_PROMPT)}
    mine = import_optional("sentence_transformers.util", _IMPORT_PURPOSE, EVALUATE_EXTRA).mine_hard_negatives
    with work("searching negatives"):
        mined = mine(
            import_optional("datasets", _IMPORT_PURPOSE, EVALUATE_EXTRA).Dataset.from_dict(columns),
            model,
            relative_margin=max(1 - settings.share, _MIN_MARGIN),
            num_negatives=settings.negatives,
            range_max=searched,
            sampling_strategy="top",
            query_prompt_name=prompts[QUERY_PROMPT],
            corpus_prompt_name=prompts[DOCUMENT_PROMPT],
            output_format="n-tuple",
            batch_size=settings.batch,
            verbose=False,
        )
    found = [PairExample(row["query"], row["positive"], tuple(list(row.values())[2:])) for row in mined]
    lacking = f"fewer than {settings.negatives} texts with a cosine below {settings.share:g} of the positive's"
    if not found:
        raise TaskError(
            f"every example has {lacking}",
            remedy="use a smaller --negatives or a larger --share, or give more pairs",
        )
    if len(found) < len(pairs):
        left_out = f"{len(pairs) - len(found):,} of {len(pairs):,}"
        _LOG.warning("%s distinct examples are left out, because they have %s", left_out, lacking)
    return found
