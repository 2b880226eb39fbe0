"""The corpora of a stream, opened at the URIs that the spec names, and checks that they fit the spec."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import TOKENIZER_FOLDER, BlockTable, CorpusManifest
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.parts import with_parts
from data_service.corpus.reader import read_block
from data_service.corpus.removals import RemovedDocuments, load_removals_up_to, replace_removed_text
from data_service.errors import CorpusError
from data_service.samples.masking import MaskingTables
from data_service.samples.pairs import Translations
from data_service.samples.similar_words import SimilarWords, load_similar_words
from data_service.samples.spec import Input, SourceSpec, StreamSpec
from data_service.samples.texts import TextPairs
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.types import Block, Level


class Corpora:
    """A reader of the blocks of a spec's sources. Threads may share it.

    Raises:
        CorpusError: a corpus is absent or damaged, or does not fit the spec.
        StoreError: a store cannot be read.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        roots = [open_store(source.uri) for source in spec.sources]
        manifests = [load_manifest(store) for store in roots]
        opened = zip(roots, manifests, strict=True)
        self._stores = [with_parts(store, manifest) for store, manifest in opened]
        for source, manifest in zip(spec.sources, manifests, strict=True):
            _check_source(spec, source, manifest)
        self.tables = tuple(_table_of_split(spec, manifest) for manifest in manifests)
        self._removed = [
            _removed_documents(spec, *source) for source in zip(spec.sources, self._stores, manifests, strict=True)
        ]
        self._counts = [manifest.unigram for manifest in manifests]
        self._levels = [manifest.words.levels if manifest.words else () for manifest in manifests]
        self._word_rules = min(manifest.word_rules_version for manifest in manifests)
        self._tokenizer_hash = manifests[0].tokenizer_hash
        for source, manifest in zip(spec.sources, manifests, strict=True):
            if manifest.tokenizer_hash != self._tokenizer_hash:
                raise CorpusError(
                    f"source {source.name} ({source.uri}) was built with tokenizer "
                    f"{manifest.tokenizer_hash[:12]}, source {spec.sources[0].name} "
                    f"with {self._tokenizer_hash[:12]}",
                    remedy="build all sources of a mixture with the same tokenizer",
                )

    def with_row_length(self, length: int) -> "Corpora":
        """Return the same corpora for rows of another length, without stages."""
        found = copy(self)
        found.spec = self.spec.model_copy(update={"length": length, "stages": ()})
        return found

    def read_source_block(self, source: int, block: int) -> Block:
        """Return one verified block, with padding in place of removed documents. Raises the errors of
        `data_service.corpus.reader.read_block`."""
        found, removed = read_block(self._stores[source], self.tables[source], block), self._removed[source]
        return (
            found
            if removed is None
            else replace_removed_text(found, removed.token_ranges(block), self.spec.special.pad)
        )

    @property
    def masking_tables(self) -> MaskingTables:
        """The tables that the spec's masking needs. Raises CorpusError: the corpora do not have them."""
        return MaskingTables(self.word_start_table, self.token_counts, self.similar_words)

    @cached_property
    def word_start_table(self) -> NDArray[np.bool_] | None:
        """[vocab_size] bool, the tokenizer's table of pieces that begin a word; None if single tokens are masked.

        It is used for blocks that do not store where words begin. It follows the oldest version of the word rules with
        which a corpus was built, so that the masks of a training run do not change.

        Raises CorpusError: a corpus stores no words, and no ordinary piece of the vocabulary begins a word; or phrases
        or entities are masked, and a corpus stores none.
        """
        unit = self.spec.masking.unit
        if unit == "token":
            return None
        check_unit_levels(unit, {source.name: source.uri for source in self.spec.sources}, self._levels)
        tokenizer = load_tokenizer(self._stores[0].with_prefix(TOKENIZER_FOLDER).uri)
        starts = tokenizer.word_starts_by(self._word_rules)
        stored = all("word" in levels for levels in self._levels)
        if not stored and not starts[self.spec.vocabulary.ordinary].any():
            raise CorpusError(
                f"masking by {unit} needs words, but no piece of this corpus's tokenizer begins a word",
                remedy="mask by token, or build the corpus with a tokenizer that marks where words begin",
            )
        return starts

    @cached_property
    def similar_words(self) -> SimilarWords | None:
        """The table of similar words; None if words are not replaced by similar ones.

        Raises CorpusError: the table is missing, is not the one that the spec names, or is of another tokenizer.
        """
        masking = self.spec.masking
        if masking.kind != "mlm" or not masking.replace.similar:
            return None
        return load_similar_words(self.spec.similar, self._tokenizer_hash)

    @cached_property
    def token_counts(self) -> NDArray[np.int64] | None:
        """[vocab_size] int64, the token counts of all sources together; None if random replacements do not need them.

        Raises CorpusError: no ordinary token was counted.
        """
        masking = self.spec.masking
        if masking.kind != "mlm" or masking.replace.random_from != "unigram":
            return None
        counts: NDArray[np.int64] = np.sum(self._counts, axis=0)
        if not counts[self.spec.vocabulary.ordinary].any():
            raise CorpusError(
                "the corpora have no token counts, so random replacements cannot be drawn by frequency",
                remedy="build the corpus again, or set objective.mlm.replace.random_from to vocabulary",
            )
        return counts


def check_unit_levels(unit: str, uris: Mapping[str, str], levels: Sequence[tuple[Level, ...]]) -> None:
    """Raise CorpusError if phrases or entities are masked and a corpus does not store them.

    Args:
        unit: unit that is masked.
        uris: URIs of the sources, by name.
        levels: levels of units that each source stores.
    """
    for (name, uri), stored in zip(uris.items(), levels, strict=True):
        if unit in ("phrase", "entity") and unit not in stored:
            raise CorpusError(
                f"masking by {unit} needs a lexicon's units, but source {name} ({uri}) was built without a lexicon",
                remedy="build the corpus with `maskfleet corpus build --lexicon FILE`, or mask by whole_word",
            )


def check_languages(manifest: CorpusManifest, uri: str, rows: Input, source_name: str, languages: int) -> None:
    """Raise CorpusError if a recipe of translations gives source `source_name` the wrong number of `languages`.

    A corpus of pairs needs two languages, a corpus of text one.
    """
    if not isinstance(rows, Translations):
        return
    if manifest.pairs is not None and languages < 2:
        raise CorpusError(
            f"{uri} is a corpus of pairs, but source {source_name} does not name its two languages",
            remedy=f"set corpus.sources.{source_name}.languages to the query's and the positive's, as in [en, fr]",
        )
    if manifest.pairs is None and languages > 1:
        raise CorpusError(
            f"{uri} is a corpus of running text, but source {source_name} names two languages, as for translations",
            remedy="build it with `maskfleet corpus build --texts pairs`, or name only one language",
        )


def check_corpus_kind(manifest: CorpusManifest, uri: str, rows: Input) -> None:
    """Raise CorpusError if a corpus of pairs is read as text, a corpus of text as pairs, or pairs have too few
    negatives.

    Translations are checked by `check_languages`.
    """
    pairs = manifest.pairs
    if isinstance(rows, Translations):
        return
    if not isinstance(rows, TextPairs):
        if pairs is not None:
            raise CorpusError(
                f"{uri} is a corpus of pairs, but input.packing {rows.packing} makes rows of running text",
                remedy="set input.packing to pairs, or to translations if the texts are translations, or build a "
                "corpus of running text with `maskfleet corpus build`",
            )
    elif pairs is None:
        raise CorpusError(
            f"{uri} is a corpus of running text, and input.packing pairs needs queries with their positives",
            remedy="build it with `maskfleet corpus build --texts pairs`, or set input.packing to sentences, which "
            "pairs a text with itself",
        )
    elif pairs.negatives < rows.negatives:
        raise CorpusError(
            f"{uri} has {pairs.negatives} negatives for each query, and input.negatives asks for {rows.negatives}",
            remedy=f"set input.negatives to {pairs.negatives}, or build the corpus with --negatives {rows.negatives}",
        )


def _check_source(spec: StreamSpec, source: SourceSpec, manifest: CorpusManifest) -> None:
    """Raise CorpusError if the corpus of a source is not the one that the spec names, or does not fit the spec."""
    if manifest.fingerprint != source.manifest_fingerprint:
        raise CorpusError(
            f"source {source.name}: the corpus at {source.uri} has fingerprint {manifest.fingerprint[:12]}, "
            f"expected {source.manifest_fingerprint[:12]}",
            remedy="give the URI of the corpus with which the run was created, or start a new run on this corpus",
        )
    check_corpus_kind(manifest, source.uri, spec.input)
    check_languages(manifest, source.uri, spec.input, source.name, len(source.languages))
    if manifest.vocab_size != spec.vocab_size:
        raise CorpusError(
            f"source {source.name}: the corpus at {source.uri} has {manifest.vocab_size} ids, "
            f"expected {spec.vocab_size}",
            remedy="use the tokenizer that the corpus was built with",
        )


def _table_of_split(spec: StreamSpec, manifest: CorpusManifest) -> BlockTable:
    return manifest.train if spec.split == "train" else manifest.heldout


def _removed_documents(
    spec: StreamSpec, source: SourceSpec, store: Store, manifest: CorpusManifest
) -> RemovedDocuments | None:
    """Return the documents of a source that the spec leaves out; None if there are none."""
    if not source.removals:
        return None
    # Padding replaces removed text, so it must never be masked.
    assert spec.special.pad in spec.never_masked
    return load_removals_up_to(store, manifest, source.removals).removed_documents(spec.split)
