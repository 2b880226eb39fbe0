"""Lets a corpus grow: new text is built into a part of its own by the corpus's settings, and both are merged.

    grown/manifest.json     lists the shards of the old corpus and of the new part (`data_service.corpus.merge`)
    grown/added/            the new part, a complete corpus

No shard of the old corpus is written again, so runs on it go on. Tokenizer, sentences, words, held-out rule, blocks
and, unless others are given, the names of fields and of provenance are those of the old corpus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_service.corpus.corpus import Corpus, open_corpus, open_part
from data_service.corpus.manifest import CONFIGURATION, MANIFEST, TOKENIZER, CorpusManifest
from data_service.corpus.merge import (
    COPIES,
    SPLITS,
    ReportBlocks,
    claim_place,
    join_corpora,
    parts_of,
)
from data_service.corpus.merged_ids import EqualIds
from data_service.corpus.removals import load_removals
from data_service.corpus.words import WordOptions, resolve
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.heldout import heldout_like
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import ReportProgress, remove_objects
from data_service.store.base import Store
from data_service.store.open import open_store

ADDED = "added"
"""Folder of the new part, below the grown corpus."""
_OPEN = {"text_field", "txt_documents", "encoding", "delimiter", "provenance", "on_bad_bytes"}
"""Settings in whose place others may be given: they say how the new input is written."""


@dataclass(frozen=True)
class AppendReport:
    """A grown corpus.

    Attributes:
        added: number of documents of the new part.
        copies: number of them that the old corpus has, too, and that are left out.
        documents: number of documents of both.
        removed: number of documents that were removed from either.
    """

    added: int
    copies: int
    documents: int
    removed: int


def append_documents(
    corpus: str,
    inputs: Sequence[str],
    output: str,
    options: BuildOptions,
    *,
    by: str,
    at: int,
    progress: ReportProgress,
    report: ReportBlocks = lambda done, total: None,
) -> AppendReport:
    """Write the corpus at `corpus`, grown by the documents of `inputs`, to `output`.

    Documents whose tokens the corpus has are left out. An append that was interrupted is continued by the same call; a
    complete one is known.

    Args:
        corpus: URI of the corpus that grows. It must stay where it is.
        inputs: as for `build_corpus`.
        output: folder or s3:// prefix of its own. It must stay where it is, too, if it grows further.
        options: what `options_like` returns.
        by: user and host, for the removal of copies.
        at: seconds since 1970.
        progress: function that is called as the new part is built.
        report: function that is called as the documents of both are compared.

    Raises:
        EqualIds: a new document has the id of one of the corpus, and is no copy of it. The new part is deleted.
        InputError, CorpusError, StoreError: as `build_corpus` and `merge_corpora`.
    """
    source, store = open_corpus(corpus), open_store(output)
    place = store.at(ADDED).uri
    complete = store.size(MANIFEST) is not None
    if complete:
        _refuse_other(store, source)
    else:
        claim_place(store, {"append": source.manifest.digest})
        if not any(store.size(f"{ADDED}/{key}") is not None for key in (MANIFEST, CONFIGURATION)):
            remove_objects(store, f"{ADDED}/", progress)  # of a part that was being deleted
    build_corpus(list(inputs), place, f"{corpus.rstrip('/')}/{TOKENIZER}", options, progress)
    new = open_corpus(place)
    if not complete:
        try:
            join_corpora([source, new], store, by=by, at=at, report=report)
        except EqualIds:
            remove_objects(store, f"{ADDED}/{MANIFEST}", progress)  # first: what is left of it is no corpus
            remove_objects(store, f"{ADDED}/", progress)
            store.delete(CONFIGURATION)
            raise
    store.delete(CONFIGURATION)
    return _report(open_corpus(output), new)


def _refuse_other(store: Store, source: Corpus) -> None:
    """Raise CorpusError if the corpus at `store` is not `source`, grown by a part that lies in it."""
    parts = open_corpus(store.uri).manifest.parts
    built = store.size(f"{ADDED}/{MANIFEST}") is not None
    if not built or parts != (*parts_of(source), *parts_of(open_corpus(store.at(ADDED).uri))):
        raise CorpusError(
            f"{store.uri} holds a corpus, but not {source.store.uri} grown by an append",
            remedy="choose another place",
        )


def _report(grown: Corpus, new: Corpus) -> AppendReport:
    sizes = {split: int(new.table(split).documents.sum()) for split in SPLITS}
    totals = {split: int(grown.table(split).documents.sum()) for split in SPLITS}
    copies = removed = 0
    for removal in load_removals(grown.store, grown.manifest).removals:
        for split in SPLITS:
            gone = (removal.train if split == "train" else removal.heldout).documents
            own = int((gone >= totals[split] - sizes[split]).sum()) if removal.reason == COPIES else 0
            copies, removed = copies + own, removed + len(gone) - own
    return AppendReport(sum(sizes.values()), copies, sum(totals.values()), removed)


def options_like(
    corpus: Corpus, *, workers: int, on_bad_records: str, word_files: Mapping[str, str], **others: object
) -> BuildOptions:
    """Return the options by which new documents for `corpus` are built: those of the corpus.

    Args:
        word_files: URIs of the files of words with which the corpus was built, by the name of the option.
        others: settings in place of the corpus's own, of `text_field`, `txt_documents`, `encoding`, `delimiter`,
            `provenance` and `on_bad_bytes`.

    Raises:
        CorpusError: the corpus has no provenance, but settings of one are given; or a file of words is missing or
            another one.
        InputError, StoreError: a file of words cannot be read.
    """
    assert others.keys() <= _OPEN, "no other setting may differ"
    origin = _first_part(corpus).manifest
    if "provenance" in others and not origin.provenance:
        raise CorpusError(
            f"{corpus.store.uri} was built without provenance, so it is not known of all documents",
            remedy="leave --provenance out, or build a corpus of all text anew with it",
        )
    kept = {name: value for name, value in origin.options.items() if name in BuildOptions.model_fields}
    words = _words(corpus, origin, word_files)
    return BuildOptions.model_validate(
        kept
        | heldout_like(corpus.manifest)
        | {"words": words, "workers": workers, "on_bad_records": on_bad_records}
        | others
    )


def _first_part(corpus: Corpus) -> Corpus:
    """Return the corpus that was built, and grew into `corpus`. Raises CorpusError: it is no longer there."""
    return open_part(corpus, 0) if corpus.manifest.parts else corpus


def _words(corpus: Corpus, origin: CorpusManifest, files: Mapping[str, str]) -> WordOptions | None:
    """Return the options of words with which the corpus was built; None if it stores none."""
    known = origin.words
    recorded = {} if known is None else known.model_dump(exclude_none=True)
    needed = {"dictionary", "user_words", "lexicon"} & recorded.keys()
    if wrong := sorted(needed ^ files.keys()):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise CorpusError(
            f"{corpus.store.uri} was built {'with' if set(wrong) <= needed else 'without'} {named}",
            remedy="give the files of words with which it was built, and no others",
        )
    if known is None:
        return None
    field = {} if known.field is None else {"field": known.field}
    options = WordOptions.model_validate({"segmenter": known.segmenter, **field, **files})
    found, _ = resolve(options)
    if found != known:
        raise CorpusError(
            f"{corpus.store.uri} was built with other words: {recorded}, but now {found.model_dump(exclude_none=True)}",
            remedy="give the same files, and install the same version of the segmenter",
        )
    return options
