"""`build_corpus`: raw text to a corpus of shards, in two passes over splits of the input.

Big compressed files are measured first, so that they can be cut into splits like others (`streamed.py`).

The first pass hashes every document; the hashes are compared, a range at a time; the second pass encodes what
is not a later copy. Every task is a pure function of the inputs and the options and leaves a receipt, so any
number of workers writes the same bytes, and a build that was interrupted does only what has no receipt.
"""

from functools import partial

from data_service.errors import CorpusError, InputError
from data_service.ingest.assemble import assemble
from data_service.ingest.compare import Compared, compare, drop_slices, plan_partitions
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
from data_service.ingest.hashing import hash_of
from data_service.ingest.inputs import Listing, list_inputs
from data_service.ingest.layout import BUILD, CONFIGURATION, TOKENIZER, Layout
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Pool, Work, run_stage
from data_service.ingest.progress import Progress, Report
from data_service.ingest.scan import Scanned, ScanTask, scan
from data_service.ingest.splits import Split, plan_splits, streamed_files
from data_service.ingest.streamed import Measured, MeasureTask, measure
from data_service.ingest.write import WriteTask, Written, write
from data_service.shards.manifest import Manifest
from data_service.shards.manifest_file import save_manifest
from data_service.store.base import Entry, Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.store.together import together
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer

_DELETED = 1000  # objects that one request deletes


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
        InputError: inputs that are missing, empty, or not the text they should be, naming file and place.
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
    _remove_scaffolding(store, progress)
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
    with _pool(listing, options) as pool:
        splits, scanned = _first_pass(layout, listing, options, pool, progress)
        save_tokenizer(tokenizer, store.at(TOKENIZER).uri)
        written = _second_pass(layout, splits, scanned, tokenizer.hash, options, pool, progress)
    manifest = assemble(layout, wanted, tokenizer, scanned, written, listing, progress)
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
    layout = Layout(store.uri, identity(wanted))
    with _pool(listing, options) as pool:
        splits, scanned = _first_pass(layout, listing, options, pool, progress)
    try:
        refuse_other_text(store, manifest, splits, scanned)
    except CorpusError:
        _remove_scaffolding(store, progress)
        raise


def _pool(listing: Listing, options: BuildOptions) -> Pool:
    return Pool(options.workers, options.split_bytes if streamed_files(listing.files, options) else 0)


def _measure(
    layout: Layout, listing: Listing, options: BuildOptions, pool: Pool, progress: Report
) -> dict[str, int]:
    """Decompressed sizes of big compressed files, by URI. Takes a pass of decompression alone, of all at once."""
    files = streamed_files(listing.files, options)
    if not files:
        return {}
    tasks = [MeasureTask(layout, index, file) for index, file in enumerate(files)]
    measured = run_stage(Work("measuring", tasks, measure, Measured), layout.open(), pool, progress)
    return {file.uri: result.plain_size for file, result in zip(files, measured, strict=True)}


def _first_pass(
    layout: Layout, listing: Listing, options: BuildOptions, pool: Pool, progress: Report
) -> tuple[list[Split], list[Scanned]]:
    try:
        sizes = _measure(layout, listing, options, pool, progress)
        splits = plan_splits(listing.files, options, sizes)
        tasks = [ScanTask(layout, index, split, options) for index, split in enumerate(splits)]
        scanned = run_stage(Work("reading", tasks, scan, Scanned), layout.open(), pool, progress)
        if not any(split.documents for split in scanned):
            _remove_scaffolding(layout.open(), progress)
            raise _no_text(scanned)
    except InputError:
        # Mending the input may make it another build, skipping what is bad the same: what was scanned stays.
        layout.open().delete(CONFIGURATION)
        raise
    return splits, scanned


def _no_text(scanned: list[Scanned]) -> InputError:
    skipped = [record for split in scanned for record in split.first_skipped]
    first = (
        f"; the first of {sum(split.skipped for split in scanned):,} bad records: {skipped[0]}"
        if skipped
        else ""
    )
    return InputError(
        f"no document with text in the inputs ({sum(split.empty for split in scanned)} empty ones{first})",
        remedy="check the inputs, and --text-field or --txt-documents",
    )


def _second_pass(
    layout: Layout,
    splits: list[Split],
    scanned: list[Scanned],
    tokenizer_hash: str,
    options: BuildOptions,
    pool: Pool,
    progress: Report,
) -> list[Written]:
    partitions = plan_partitions(layout, scanned)
    compared = run_stage(Work("comparing", partitions, compare, Compared), layout.open(), pool, progress)
    dropped = [part.digest for part in compared]
    tasks = [
        WriteTask(
            layout=layout,
            index=i,
            split=split,
            options=options,
            tokenizer_hash=tokenizer_hash,
            drops=drop_slices(layout, i, compared),
            digest=scanned[i].digest,
            source=hash_of([scanned[i].digest, *dropped]),
        )
        for i, split in enumerate(splits)
    ]
    return run_stage(Work("writing", tasks, write, Written), layout.open(), pool, progress)


def _remove_scaffolding(store: Store, progress: Report) -> None:
    """Take down what only the build needed."""
    entries = list(store.list(BUILD))
    batches = [entries[start : start + _DELETED] for start in range(0, len(entries), _DELETED)]
    total = sum(entry.size for entry in entries)
    done = size = 0
    for batch in together(partial(_delete, store), batches):
        done, size = done + len(batch), size + sum(entry.size for entry in batch)
        progress(Progress("clearing up", done, len(entries), size, total))


def _delete(store: Store, batch: list[Entry]) -> list[Entry]:
    store.delete_many([entry.key for entry in batch])
    return batch
