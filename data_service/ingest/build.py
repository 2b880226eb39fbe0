"""`build_corpus`: raw text to a corpus of shards, in two passes over splits of the input.

The first pass hashes every document; the hashes are compared, a range at a time; then it is settled what is held out;
the second pass encodes what is not a later copy. Every task is a pure function of the inputs and the options and
leaves a receipt, so any number of workers writes the same bytes, and a build that was interrupted does only what has
no receipt.
"""

from collections import Counter

from data_service.errors import InputError
from data_service.ingest.assemble import assemble
from data_service.ingest.compare import Compared, compare, drop_slices, plan_partitions, together
from data_service.ingest.configuration import Configuration, claim, configuration, identity, refuse_own_output
from data_service.ingest.divide import Divided, DivideTask, divide
from data_service.ingest.heldout import (
    Documents,
    by_documents,
    by_stretches,
    candidates_below,
    stretch_length,
)
from data_service.ingest.inputs import Listing, list_inputs
from data_service.ingest.layout import BUILD, TOKENIZER, Layout
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Pool, Work, run_stage
from data_service.ingest.progress import Progress, Report
from data_service.ingest.scan import Scanned, ScanTask, scan
from data_service.ingest.splits import Split, plan_splits
from data_service.ingest.write import Kept, WriteTask, Written, write
from data_service.shards.manifest import HeldoutRule, Manifest
from data_service.shards.manifest_file import save_manifest
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
        InputError: inputs that are missing, empty, too small to hold any out, or not the text they should be.
        CorpusError: another corpus is there; no document is left to train on.
        TokenizerError, StoreError: a tokenizer or a place that cannot be used.
    """
    store = open_store(output)
    listing = list_inputs(inputs)
    refuse_own_output(store, listing)
    encoder = load_tokenizer(tokenizer)
    wanted = configuration(inputs, listing, encoder.hash, options)
    manifest = claim(store, wanted)
    if manifest is None:
        try:
            manifest = _build(store, listing, encoder, wanted, options, progress)
        except KeyMissing:
            # Somebody else may have finished the same build meanwhile and taken down the scaffolding.
            manifest = claim(store, wanted)
            if manifest is None:
                raise
    else:
        shards, size = len(manifest.shard_sizes), sum(manifest.shard_sizes.values())
        progress(Progress("already built", shards, shards, size, size))
    _remove_scaffolding(store)
    return manifest


def _build(
    store: Store,
    listing: Listing,
    tokenizer: Tokenizer,
    wanted: Configuration,
    options: BuildOptions,
    progress: Report,
) -> Manifest:
    layout = Layout(store.uri, identity(wanted))
    splits = plan_splits(listing.files, options)
    with Pool(options.workers) as pool:
        scanned = _first_pass(layout, splits, options, pool, progress)
        save_tokenizer(tokenizer, store.at(TOKENIZER).uri)
        partitions = plan_partitions(layout, scanned, options.heldout_fraction)
        compared = run_stage(Work("comparing", partitions, compare, Compared), layout.open(), pool, progress)
        kept = _kept(layout, splits, scanned, compared, options)
        heldout = _settle(layout, kept, together(compared), options, pool, progress)
        tasks = [WriteTask(split, index, tokenizer.hash, heldout) for index, split in enumerate(kept)]
        written = run_stage(Work("writing", tasks, write, Written), layout.open(), pool, progress)
    manifest = assemble(layout, wanted, tokenizer, scanned, written, listing.ignored, heldout)
    save_manifest(store, manifest)
    return manifest


def _first_pass(
    layout: Layout, splits: list[Split], options: BuildOptions, pool: Pool, progress: Report
) -> list[Scanned]:
    tasks = [ScanTask(layout, index, split, options) for index, split in enumerate(splits)]
    try:
        scanned = run_stage(Work("reading", tasks, scan, Scanned), layout.open(), pool, progress)
        if not any(split.documents for split in scanned):
            raise InputError(
                f"no document with text in the inputs ({sum(split.empty for split in scanned)} empty ones)",
                remedy="check the inputs, and --text-field or --txt-documents",
            )
    except InputError:
        _remove_scaffolding(layout.open())  # whatever mends the input makes it another build
        raise
    return scanned


def _kept(
    layout: Layout,
    splits: list[Split],
    scanned: list[Scanned],
    compared: list[Compared],
    options: BuildOptions,
) -> list[Kept]:
    return [
        Kept(layout, split, options, drop_slices(layout, i, compared), scanned[i].digest)
        for i, split in enumerate(splits)
    ]


def _settle(
    layout: Layout, kept: list[Kept], found: Documents, options: BuildOptions, pool: Pool, progress: Report
) -> HeldoutRule:
    """What is held out. Stretches are only looked for where whole documents will not do."""
    fraction, size = options.heldout_fraction, found.size
    rule = by_documents(found, fraction)
    if rule is not None:
        return rule
    length, below = stretch_length(size, fraction), candidates_below(size, fraction)
    tasks = [DivideTask(split, index, length, below) for index, split in enumerate(kept)]
    candidates: Counter[int] = Counter()
    for divided in run_stage(Work("dividing", tasks, divide, Divided), layout.open(), pool, progress):
        candidates.update(dict(divided.candidates))
    try:
        return by_stretches(candidates, size, fraction)
    except InputError:
        _remove_scaffolding(layout.open())  # more text makes it another build
        raise


def _remove_scaffolding(store: Store) -> None:
    """Take down what only the build needed."""
    for entry in list(store.list(BUILD)):
        store.delete(entry.key)
