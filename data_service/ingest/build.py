"""`build_corpus`: raw text to a corpus of shards, in two passes over splits of the input (`passes.py`)."""

from dataclasses import replace

from data_service.corpus.layout import TOKENIZER, Layout
from data_service.corpus.manifest import Manifest, PairTexts
from data_service.corpus.manifest_file import save_manifest
from data_service.errors import CorpusError
from data_service.ingest.assemble import assemble
from data_service.ingest.configuration import (
    VERSIONS,
    Configuration,
    claim,
    configuration,
    identity,
    refuse_other_text,
    refuse_own_output,
    refuse_skipped,
)
from data_service.ingest.inputs import Listing, list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.passes import Passes, remove_scaffolding
from data_service.ingest.pool import Pool
from data_service.ingest.progress import Progress, Report
from data_service.ingest.splits import streamed_files
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer


def build_corpus(
    inputs: list[str], output: str, tokenizer: str, options: BuildOptions, progress: Report
) -> Manifest:
    """Build a corpus, or continue or find the same one.

    Args:
        inputs: files, folders and globs, local or s3://; of equal documents the first in this order is kept.
        output: where the corpus goes, a folder or an s3:// prefix of its own; all workers must reach it.
        tokenizer: folder of the tokenizer; its files are copied into the corpus.
        options: see `BuildOptions`.
        progress: called in this process as tasks finish.

    Raises:
        InputError: inputs that are missing, empty, too small to hold any out, or not the text they should be, naming
            file and place.
        CorpusError: another corpus is there; no document is left to train on.
        TokenizerError, StoreError: a tokenizer or a place that cannot be used.
    """
    store = open_store(output)
    listing = list_inputs(inputs)
    refuse_own_output(store, listing)
    encoder = load_tokenizer(tokenizer)
    wanted = configuration(inputs, listing, encoder.hash, options)
    manifest = claim(store, wanted)
    if manifest is not None:
        refuse_skipped(store, manifest, options)
        if manifest.options.get(VERSIONS) != wanted[VERSIONS]:
            _refuse_other_text(store, listing, manifest, wanted, options, progress)
        shards, size = len(manifest.shard_sizes), sum(manifest.shard_sizes.values())
        progress(Progress("already built", shards, shards, size, size))
    else:
        try:
            manifest = _build(store, listing, encoder, wanted, options, progress)
        except KeyMissing:
            # Somebody else may have finished the same build meanwhile and taken down the scaffolding.
            manifest = claim(store, wanted)
            if manifest is None:
                raise
    remove_scaffolding(store, progress)
    return manifest


def _build(
    store: Store,
    listing: Listing,
    tokenizer: Tokenizer,
    wanted: Configuration,
    options: BuildOptions,
    progress: Report,
) -> Manifest:
    with _pool(listing, options) as pool:
        passes = Passes(Layout(store.uri, identity(wanted)), listing.files, options, pool, progress)
        scanned = passes.scan()
        heldout, kept = passes.settle(scanned)
        save_tokenizer(tokenizer, store.at(TOKENIZER).uri)
        written = passes.write(kept, heldout, tokenizer.hash)
    manifest = assemble(passes.layout, wanted, tokenizer, scanned, written, listing, heldout, progress)
    if options.pairs is not None:
        manifest = replace(manifest, pairs=PairTexts(options.pairs.count))
    save_manifest(store, manifest)
    return manifest


def _refuse_other_text(
    store: Store,
    listing: Listing,
    manifest: Manifest,
    wanted: Configuration,
    options: BuildOptions,
    progress: Report,
) -> None:
    """Read inputs that may have changed since a corpus was completed. Raises CorpusError if they have."""
    with _pool(listing, options) as pool:
        passes = Passes(Layout(store.uri, identity(wanted)), listing.files, options, pool, progress)
        scanned = passes.scan()
    try:
        refuse_other_text(store, manifest, passes.splits, scanned)
    except CorpusError:
        remove_scaffolding(store, progress)
        raise


def _pool(listing: Listing, options: BuildOptions) -> Pool:
    return Pool(options.workers, options.split_bytes if streamed_files(listing.files, options) else 0)
