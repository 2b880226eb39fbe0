"""The documents that `maskfleet runs exposure` looks for: by number, by id, or all that were removed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from data_service.corpus.corpus import Corpus, locate_document_tokens, open_corpus
from data_service.corpus.removals import load_removals
from data_service.errors import CorpusError
from data_service.stream.exposure import TokenRange
from launcher.errors import RunError
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_name, corpus_source
from launcher.runtime.run.record import Run

ReportDone = Callable[[int, int], None]  # takes the numbers of files that were read just now, and of all files
_MAX_NAMED_IDS = 20  # largest number of unknown ids that an error names


@dataclass(frozen=True, order=True)
class DocumentName:
    """Document `number` of the training split of the source `source`, counted as by `maskfleet corpus show --index`."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}:{self.number}"


@dataclass(frozen=True)
class DocumentSelection:
    """The documents whose rows `maskfleet runs exposure` looks for.

    Attributes:
        places: token range of each training document in its corpus.
        ids: ids of the documents that were selected by id.
        heldout: names of held-out documents, which no step reads.
    """

    places: dict[DocumentName, TokenRange]
    ids: dict[DocumentName, str] = field(default_factory=dict)
    heldout: tuple[str, ...] = ()

    def describe(self, document: DocumentName) -> str:
        """Return a document's name for people, with its id if it was selected by id."""
        return f"{document} (id {self.ids[document]})" if document in self.ids else str(document)


def documents_by_number(run: Run, documents: Sequence[DocumentName]) -> DocumentSelection:
    """Return the selection of training documents with these numbers.

    Raises:
        RunError: the run has no such source.
        CorpusError: the source has no such document, or its corpus cannot be read.
        StoreError: a store cannot be read.
    """
    sources = list(run.recipe.corpus.sources)
    for document in documents:
        if document.source not in sources:
            raise RunError(f"{run.uri} has no source {document.source}", remedy=f"its sources are {', '.join(sources)}")
    wanted = {document.source for document in documents}
    opened = {name: corpus for name, corpus in _source_corpora(run) if name in wanted}
    return DocumentSelection(
        {
            document: TokenRange(
                sources.index(document.source),
                *locate_document_tokens(opened[document.source], "train", document.number),
            )
            for document in documents
        }
    )


def documents_by_id(run: Run, ids: Iterable[str], report: ReportDone = lambda done, total: None) -> DocumentSelection:
    """Return the documents with these ids in all sources that record ids.

    `report` is called while the sidecar files of a source, which hold its ids, are read.

    Raises:
        CorpusError: ids are in no source, or a corpus cannot be read.
        StoreError: a store cannot be read.
    """
    from data_service.corpus.sidecar import find_ids  # pyarrow is imported only where it is needed

    wanted = set(ids)
    selection, missing, heldout = DocumentSelection({}), set(wanted), list[str]()
    for number, (name, corpus) in enumerate(_source_corpora(run)):
        if not corpus.manifest.provenance:
            continue
        for found in find_ids(corpus, wanted, report):
            at, known = found.origin, str(found.origin.provenance.id)
            missing.discard(known)
            if found.split == "heldout":
                heldout.append(f"{name}:heldout:{found.number} (id {known})")
                continue
            document = DocumentName(name, found.number)
            selection.places[document] = TokenRange(number, at.block, at.start, at.start + at.tokens)
            selection.ids[document] = known
    if missing:
        more = f" and {len(missing) - _MAX_NAMED_IDS:,} more" if len(missing) > _MAX_NAMED_IDS else ""
        raise CorpusError(
            f"{run.uri}: no source has a document with the id "
            f"{', '.join(map(repr, sorted(missing)[:_MAX_NAMED_IDS]))}{more}",
            remedy="only a corpus built with --provenance has ids; `maskfleet corpus find` looks for an id in a corpus",
        )
    return replace(selection, heldout=tuple(heldout))


def removed_documents(run: Run) -> DocumentSelection:
    """Return all documents that were ever removed from the run's corpora. Raises CorpusError, StoreError."""
    places: dict[DocumentName, TokenRange] = {}
    heldout: list[str] = []
    sources = list(run.recipe.corpus.sources)
    for corpus_of_run, source in corpora_by_name(run.recipe).items():
        corpus, name = open_corpus(source.uri), corpus_source(corpus_of_run)
        number, chain = sources.index(name), load_removals(corpus.store, corpus.manifest)
        gone = chain.removed_documents("train")
        for document, *at in zip(*(column.tolist() for column in vars(gone).values()), strict=True):
            places[DocumentName(name, document)] = TokenRange(number, *at)
        heldout += [f"{name}:heldout:{document}" for document in chain.removed_documents("heldout").documents.tolist()]
    return DocumentSelection(places, heldout=tuple(dict.fromkeys(heldout)))


class RemovedDocumentSteps:
    """Tells which of the selected documents a run left out at a step, because they had been removed."""

    def __init__(self, run: Run, selection: DocumentSelection) -> None:
        self._history, self._recipe = run.removal_history, run.recipe
        states = [run.removal_history.first, *(record.states for record in run.removal_history.records)]
        self._gone: dict[tuple[str, str], frozenset[int]] = {}  # by corpus and digest of its last removal
        numbers = np.array([document.number for document in selection.places], dtype=np.int64)
        for name, source in corpora_by_name(run.recipe).items() if any(states) else ():
            corpus = open_corpus(source.uri)
            chain = load_removals(corpus.store, corpus.manifest)
            for digest in {state[name] for state in states if name in state}:
                known = chain.prefix_with_digest(digest)
                removed = np.zeros(0, dtype=np.int64) if known is None else known.removed_documents("train").documents
                self._gone[name, digest] = frozenset(np.intersect1d(numbers, removed).tolist())

    def is_left_out(self, document: DocumentName, phase: int, step: int, attempt: int | None) -> bool:
        """Return whether a step of a phase left a document out; with `attempt`, in that attempt."""
        corpus = corpus_name(self._recipe, phase, document.source)
        state = self._history.states_at(step, attempt).get(corpus, "")
        return document.number in self._gone.get((corpus, state), ())


def _source_corpora(run: Run) -> Iterator[tuple[str, Corpus]]:
    """Yield each source with its corpus in the last phase that reads it; this contains the source's earlier corpora."""
    last = {corpus_source(name): source.uri for name, source in corpora_by_name(run.recipe).items()}
    for name in run.recipe.corpus.sources:
        yield name, open_corpus(last[name])
