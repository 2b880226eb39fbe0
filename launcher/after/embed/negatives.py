"""Hard negatives: answers to other queries that a checkpoint takes for the answer to a query.

Between two phases of contrastive training, the checkpoint of the first ranks all positives of a corpus of pairs for
each query, and the nearest that are not its own become the negatives of the next (ANCE: Xiong et al. 2021, arXiv
2007.00808). A text that is as near as the positive is often an answer that nobody marked. So a negative's cosine must
be below a share of the positive's (NV-Retriever: Moreira et al. 2024, arXiv 2407.15831, TopK-PercPos, 0.95).
sentence-transformers searches them.
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
_IMPORT_PURPOSE = "maskfleet embed negatives"
_MIN_MARGIN = 1e-6  # sentence-transformers treats a margin of 0 as no margin
_SEARCHED_RANKS = 1000  # texts nearest to a query, among which negatives are looked for


@dataclass(frozen=True)
class PairExample:
    """A query, its positive, and negatives, the nearest first."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()

    @property
    def json_line(self) -> bytes:
        """The example as a line of JSON, as `corpus build --texts pairs` reads it."""
        fields = {"query": self.query, "positive": self.positive, "negatives": list(self.negatives)}
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def read_pair_examples(listing: InputListing, options: BuildOptions) -> list[PairExample]:
    """Return the queries and positives of the inputs, as `corpus build --texts pairs` reads them; pairs
    with a blank text are left out.

    Raises InputError if a record has none, and StoreError.
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
    """Raise TaskError if there is a file `out` already. Call this before the search."""
    store, name = open_store_of_file(out)
    if store.size(name) is not None:
        raise TaskError(f"{out} exists already", remedy="name a new file, or delete this one")


def write_pair_examples(examples: Sequence[PairExample], out: str) -> None:
    """Write the examples to the file or s3:// URI `out`. Raises TaskError if it exists, and StoreError."""
    require_new_file(out)
    store, name = open_store_of_file(out)
    store.put(name, b"".join(example.json_line for example in examples))


def mine_negatives(
    model: "SentenceTransformer", examples: Sequence[PairExample], settings: MiningSettings
) -> list[PairExample]:
    """Return the examples with `settings.negatives` negatives each, without those that have fewer.

    Positives of a query in any of the examples are never its negatives. Prompts `query` and `document` of the model are
    put before texts. Raises TaskError if no example has as many.
    """
    pairs = list(dict.fromkeys((example.query, example.positive) for example in examples))
    warn_of_truncation(model, [positive for _, positive in pairs], "positives")
    columns = {"query": [query for query, _ in pairs], "positive": [positive for _, positive in pairs]}
    searched = min(len(set(columns["positive"])), _SEARCHED_RANKS)
    if settings.negatives > searched:
        raise TaskError(
            f"{settings.negatives} negatives are wanted for each query, of {searched} texts at most",
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
    lacking = f"fewer than {settings.negatives} texts below {settings.share:g} of the positive's cosine"
    if not found:
        raise TaskError(
            f"every example has {lacking}",
            remedy="use a smaller --negatives or a larger --share, or give more pairs",
        )
    if len(found) < len(pairs):
        left_out = f"{len(pairs) - len(found):,} of {len(pairs):,}"
        _LOG.warning("%s different examples are left out: %s", left_out, lacking)
    return found
