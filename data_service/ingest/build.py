"""`build_corpus`: raw text to a corpus of shards, in two passes over splits of the input.

Big compressed files are measured first, so that they can be cut into splits like others (`streamed.py`).

The first pass hashes every document; the hashes are compared, a range at a time; then it is settled what is held out;
the second pass encodes what is not a later copy. Every task is a pure function of the inputs and the options and
leaves a receipt, so any number of workers writes the same bytes, and a build that was interrupted does only what has
no receipt.
"""

from collections import Counter
from functools import partial

from data_service.errors import InputError
from data_service.ingest.assemble import assemble
from data_service.ingest.compare import Compared, compare, count_documents, drop_slices, plan_partitions
from data_service.ingest.configuration import Configuration, claim, configuration, identity, refuse_own_output
from data_service.ingest.divide import Divided, DivideTask, divide
from data_service.ingest.heldout import (
    Documents,
    by_documents,
    by_stretches,
)
from data_service.ingest.inputs import InputFile, Listing, list_inputs
from data_service.ingest.layout import BUILD, TOKENIZER, Layout
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Pool, Work, run_stage
from data_service.ingest.progress import Progress, Report
from data_service.ingest.scan import Scanned, ScanTask, scan
from data_service.ingest.splits import Split, plan_splits, streamed_files
from data_service.ingest.streamed import Measured, MeasureTask, measure
from data_service.ingest.write import Kept, WriteTask, Written, write
from data_service.shards.manifest import HeldoutRule, Manifest
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
    streamed = streamed_files(listing.files, options)
    with Pool(options.workers, options.split_bytes if streamed else 0) as pool:
        try:
            splits = plan_splits(listing.files, options, _measure(layout, streamed, pool, progress))
            scanned = _first_pass(layout, splits, options, pool, progress)
            partitions = plan_partitions(layout, scanned, options.heldout_fraction)
            compared = run_stage(
                Work("comparing", partitions, compare, Compared), layout.open(), pool, progress
            )
            found = count_documents(compared)
            kept = [Kept(drop_slices(layout, i, compared), scan.digest) for i, scan in enumerate(scanned)]
            dividing = [
                DivideTask(layout, i, split, options, kept[i], found.size) for i, split in enumerate(splits)
            ]
            heldout = _settle(dividing, found, pool, progress)
        except InputError:
            _remove_scaffolding(store, progress)  # whatever mends the input makes it another build
            raise
        save_tokenizer(tokenizer, store.at(TOKENIZER).uri)
        writing = [
            WriteTask(layout, i, split, options, kept[i], tokenizer.hash, heldout)
            for i, split in enumerate(splits)
        ]
        written = run_stage(Work("writing", writing, write, Written), layout.open(), pool, progress)
    manifest = assemble(layout, wanted, tokenizer, scanned, written, listing.ignored, heldout, progress)
    save_manifest(store, manifest)
    return manifest


def _measure(layout: Layout, files: list[InputFile], pool: Pool, progress: Report) -> dict[str, int]:
    """Decompressed sizes by URI. They take a pass of decompression alone, of all files at once."""
    if not files:
        return {}
    tasks = [MeasureTask(layout, index, file) for index, file in enumerate(files)]
    measured = run_stage(Work("measuring", tasks, measure, Measured), layout.open(), pool, progress)
    return {file.uri: result.plain_size for file, result in zip(files, measured, strict=True)}


def _first_pass(
    layout: Layout, splits: list[Split], options: BuildOptions, pool: Pool, progress: Report
) -> list[Scanned]:
    tasks = [ScanTask(layout, index, split, options) for index, split in enumerate(splits)]
    scanned = run_stage(Work("reading", tasks, scan, Scanned), layout.open(), pool, progress)
    if not any(split.documents for split in scanned):
        raise InputError(
            f"no document with text in the inputs ({sum(split.empty for split in scanned)} empty ones)",
            remedy="check the inputs, and --text-field or --txt-documents",
        )
    return scanned


def _settle(tasks: list[DivideTask], found: Documents, pool: Pool, progress: Report) -> HeldoutRule:
    """What is held out. Stretches are only looked for where whole documents will not do."""
    fraction = tasks[0].options.heldout_fraction
    rule = by_documents(found, fraction)
    if rule is not None:
        return rule
    candidates: Counter[int] = Counter()
    for divided in run_stage(
        Work("dividing", tasks, divide, Divided), tasks[0].layout.open(), pool, progress
    ):
        candidates.update(dict(divided.candidates))
    return by_stretches(candidates, found.size, fraction)


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
