"""Appends documents to a corpus: builds them into a new part with the corpus's settings, and merges both.

    grown/manifest.json     lists the shards of the old corpus and of the new part (`data_service.corpus.merge`)
    grown/added/            the new part, a complete corpus

Shards of the old corpus are not rewritten, so training runs on it continue. The new part has the tokenizer, held-out
rule, block size, and rules for sentences and words of the old corpus, and its names of fields unless others are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_service.corpus.corpus import SPLITS, Corpus, open_corpus, open_part
from data_service.corpus.manifest import CONFIGURATION_KEY, MANIFEST_KEY, TOKENIZER_FOLDER, CorpusManifest
from data_service.corpus.manifest_file import claim_output
from data_service.corpus.merge import DUPLICATE_REMOVAL_REASON, ReportBlocks, corpus_parts, join_corpora
from data_service.corpus.merged_ids import DuplicateIdError
from data_service.corpus.removals import load_removals
from data_service.corpus.words import WordOptions, resolve_segmentation
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.heldout import heldout_options_from_manifest
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import ReportProgress, remove_objects
from data_service.store.base import Store
from data_service.store.open import open_store

APPENDED_PART_FOLDER = "added"
"""Folder of the new part, below the grown corpus."""


@dataclass(frozen=True)
class AppendReport:
    """Numbers of documents in a grown corpus.

    Attributes:
        added: number of documents of the new part.
        copies: number of new documents that are left out, because the old corpus has them, too.
        documents: number of documents of the old corpus and the new part, with those left out.
        earlier_copies: number of copies that the old corpus left out when it grew or was merged.
        removed: number of documents that were removed for other reasons.
    """

    added: int
    copies: int
    documents: int
    earlier_copies: int
    removed: int


def options_from_corpus(
    corpus: Corpus, *, workers: int, on_bad_records: str, word_files: Mapping[str, str], **overrides: object
) -> BuildOptions:
    """Return the options for building documents to append to `corpus`.

    Args:
        word_files: URIs of the word files that the corpus was built with, by option name (such as `dictionary`).
        overrides: settings that replace the corpus's own: format and provenance of the new input, or accepted losses
            of text.

    Raises:
        CorpusError: provenance settings are given, but the corpus has no provenance; or the word files are not those
            of the corpus.
        InputError, StoreError: a word file cannot be read.
    """
    # A grown corpus has the options of its first part, which was built.
    origin = (open_part(corpus, 0) if corpus.manifest.parts else corpus).manifest
    if "provenance" in overrides and not origin.provenance:
        raise CorpusError(
            f"{corpus.store.uri} was built without provenance, so appended documents cannot have it",
            remedy="leave --provenance out, or build a new corpus from all text with --provenance",
        )
    kept = {name: value for name, value in origin.options.items() if name in BuildOptions.model_fields}
    words = _load_word_options(corpus, origin, word_files)
    return BuildOptions.model_validate(
        kept
        | heldout_options_from_manifest(corpus.manifest)
        | {"lines": "keep" if origin.keeps_white_space else "join"}
        | {"words": words, "workers": workers, "on_bad_records": on_bad_records}
        | overrides
    )


def append_documents(
    corpus: str,
    inputs: Sequence[str],
    output: str,
    options: BuildOptions,
    *,
    removed_by: str,
    removed_at: int,
    progress: ReportProgress,
    own_provenance: bool = False,
    report: ReportBlocks = lambda done, total: None,
) -> AppendReport:
    """Write the corpus at `corpus`, grown by the documents of `inputs`, to `output`.

    New documents with the same tokens as an old one are left out. A repeated call continues an interrupted append,
    and changes nothing after a complete one.

    Args:
        corpus: URI of the corpus that grows. The grown corpus refers to it, so it must stay where it is.
        inputs: as for `build_corpus`.
        output: folder or s3:// prefix for the grown corpus alone. It must not move either if it grows further.
        options: what `options_from_corpus` returns.
        removed_by: user and host that are recorded with the removal of copies.
        removed_at: time of that removal, seconds since 1970.
        progress: function that is called as the new part is built.
        own_provenance: whether the provenance in `options` was given for these inputs, so that each of its patterns of
            inputs must match one. The patterns of the old corpus need not.
        report: function that is called as new and old documents are compared.

    Raises:
        DuplicateIdError: a new document has the id of one in the corpus, but other tokens. The new part is deleted.
        InputError, CorpusError, StoreError: as `build_corpus` and `merge_corpora`.
    """
    source, store = open_corpus(corpus), open_store(output)
    place = store.with_prefix(APPENDED_PART_FOLDER).uri
    complete = store.size(MANIFEST_KEY) is not None
    if complete:
        _check_store_extends_source(store, source)
    else:
        claim_output(store, {"append": source.manifest.digest})
        if not any(
            store.size(f"{APPENDED_PART_FOLDER}/{key}") is not None for key in (MANIFEST_KEY, CONFIGURATION_KEY)
        ):
            # An interrupted deletion may have left files of the new part.
            remove_objects(store, f"{APPENDED_PART_FOLDER}/", progress)
    tokenizer = f"{corpus.rstrip('/')}/{TOKENIZER_FOLDER}"
    build_corpus(list(inputs), place, tokenizer, options, progress, constants_must_match=own_provenance)
    new = open_corpus(place)
    if not complete:
        try:
            join_corpora([source, new], store, removed_by=removed_by, removed_at=removed_at, report=report)
        except DuplicateIdError:
            # The manifest is deleted first: without it the other files do not count as a corpus.
            remove_objects(store, f"{APPENDED_PART_FOLDER}/{MANIFEST_KEY}", progress)
            remove_objects(store, f"{APPENDED_PART_FOLDER}/", progress)
            store.delete(CONFIGURATION_KEY)
            raise
    store.delete(CONFIGURATION_KEY)
    return _make_append_report(open_corpus(output), new)


def _check_store_extends_source(store: Store, source: Corpus) -> None:
    """Raise CorpusError unless the corpus at `store` consists of `source` and a new part in `store`."""
    parts = open_corpus(store.uri).manifest.parts
    built = store.size(f"{APPENDED_PART_FOLDER}/{MANIFEST_KEY}") is not None
    if not built or parts != (
        *corpus_parts(source),
        *corpus_parts(open_corpus(store.with_prefix(APPENDED_PART_FOLDER).uri)),
    ):
        raise CorpusError(
            f"{store.uri} holds a corpus that is not an extension of {source.store.uri}",
            remedy="give another folder with --out",
        )


def _make_append_report(grown: Corpus, new: Corpus) -> AppendReport:
    sizes = {split: int(new.table(split).documents.sum()) for split in SPLITS}
    totals = {split: int(grown.table(split).documents.sum()) for split in SPLITS}
    copies = earlier = removed = 0
    for removal in load_removals(grown.store, grown.manifest).removals:
        for split in SPLITS:
            gone = (removal.train if split == "train" else removal.heldout).documents
            if removal.reason != DUPLICATE_REMOVAL_REASON:
                removed += len(gone)
                continue
            own = int((gone >= totals[split] - sizes[split]).sum())  # documents of the new part have the last numbers
            copies, earlier = copies + own, earlier + len(gone) - own
    return AppendReport(
        added=sum(sizes.values()),
        copies=copies,
        documents=sum(totals.values()),
        earlier_copies=earlier,
        removed=removed,
    )


def _load_word_options(corpus: Corpus, origin: CorpusManifest, files: Mapping[str, str]) -> WordOptions | None:
    """Return the word options that the corpus was built with; None if it stores no words."""
    known = origin.words
    recorded = {} if known is None else known.model_dump(exclude_none=True)
    needed = {"dictionary", "user_words", "lexicon"} & recorded.keys()
    if wrong := sorted(needed ^ files.keys()):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise CorpusError(
            f"{corpus.store.uri} was built {'with' if set(wrong) <= needed else 'without'} {named}",
            remedy="give exactly the word files that it was built with",
        )
    if known is None:
        return None
    field = {} if known.field is None else {"field": known.field}
    options = WordOptions.model_validate({"segmenter": known.segmenter, **field, **files})
    found, _ = resolve_segmentation(options)
    if found != known:
        raise CorpusError(
            f"{corpus.store.uri} was built with word settings {recorded}, "
            f"but now they are {found.model_dump(exclude_none=True)}",
            remedy="give the word files that it was built with, and install the same version of the segmenter",
        )
    return options
