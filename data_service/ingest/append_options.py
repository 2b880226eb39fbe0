"""Options for documents to append to a corpus: those with which the corpus was built.

Separate from `append`, so that the command reports mistakes without importing the code that builds.
"""

from collections.abc import Mapping

from data_service.corpus.corpus import Corpus, open_part
from data_service.corpus.manifest import CorpusManifest
from data_service.corpus.words import WordOptions, resolve_segmentation
from data_service.errors import CorpusError
from data_service.ingest.heldout import heldout_options_from_manifest
from data_service.ingest.options import BuildOptions


def options_from_corpus(
    corpus: Corpus, *, workers: int, on_bad_records: str, word_files: Mapping[str, str], **overrides: object
) -> BuildOptions:
    """Return the options for building documents to append to `corpus`.

    Args:
        word_files: URIs of the files of words with which the corpus was built, by the name of the option.
        overrides: settings in place of the corpus's own: of the format of the new input, its provenance, or which
            losses of text are accepted.

    Raises:
        CorpusError: the corpus has no provenance, but settings of one are given; or a file of words is missing or
            another one.
        InputError, StoreError: a file of words cannot be read.
    """
    # A corpus that grew has the options of the one that was built.
    origin = (open_part(corpus, 0) if corpus.manifest.parts else corpus).manifest
    if "provenance" in overrides and not origin.provenance:
        raise CorpusError(
            f"{corpus.store.uri} was built without provenance, so appended documents cannot have it",
            remedy="leave --provenance out, or build a new corpus of all text with it",
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


def _load_word_options(corpus: Corpus, origin: CorpusManifest, files: Mapping[str, str]) -> WordOptions | None:
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
    found, _ = resolve_segmentation(options)
    if found != known:
        raise CorpusError(
            f"{corpus.store.uri} was built with other words: {recorded}, but now {found.model_dump(exclude_none=True)}",
            remedy="give the same files, and install the same version of the segmenter",
        )
    return options
