"""The configuration of a build: its inputs and options. It is written first, so that only the same build continues a
half-built corpus. It is also part of the manifest, which is made last, from the receipts of the build.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import (
    CONFIGURATION_KEY,
    MANIFEST_KEY,
    TOKENIZER_FOLDER,
    BuildLayout,
    CorpusManifest,
    HeldoutRule,
    StoredFile,
    shard_key,
    sidecar_key,
)
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.origin import Origin, join_value_counts
from data_service.corpus.words import Segmentation
from data_service.corpus.writer import WrittenShard, concatenate_shard_tables
from data_service.errors import CorpusError, InputError
from data_service.ingest.inputs import InputListing
from data_service.ingest.options import BuildOptions, describe_differences
from data_service.ingest.places import MAX_LISTED_RECORDS, with_line_numbers
from data_service.ingest.pool import Progress, ReportProgress
from data_service.ingest.records import NOT_CHOSEN_REASON
from data_service.ingest.scan import ScanReceipt
from data_service.ingest.tasks import InputSplit, hash_strings
from data_service.ingest.write import LENGTH_BINS, PartSummary, WriteReceipt
from data_service.store.base import Store, digest, parallel_map
from data_service.tokenizers.loss import TextLoss
from data_service.tokenizers.tokenizer import Tokenizer

RULES_VERSION = 3  # version of the build's rules; raised when the same inputs and options would give other bytes

FILE_VERSIONS_ENTRY = "input_versions"  # hash of the versions of all input files
SPLIT_HASHES_ENTRY = "input_content"  # hashes of the text of each split
_ENTRIES_WITHOUT_EFFECT = ("inputs", FILE_VERSIONS_ENTRY, SPLIT_HASHES_ENTRY)  # they do not change the corpus

Configuration = Mapping[str, object]  # JSON values by entry, see `make_configuration`


def make_configuration(
    patterns: list[str],
    listing: InputListing,
    tokenizer_hash: str,
    options: BuildOptions,
    words: Segmentation | None = None,
) -> Configuration:
    """Return the configuration as JSON values: all that determines a corpus's bytes, and two entries that do not.

    These are `inputs`, for people to read, and `input_versions`, which changes when a file is written again, even with
    the same text. So a complete corpus also stores hashes of its text (`input_content`, see `check_text_unchanged`).
    """
    return {
        "rules": RULES_VERSION,
        "inputs": patterns,
        "input_files": len(listing.files),
        "input_bytes": sum(file.size for file in listing.files),
        "input_listing": hash_strings([file.uri, file.size] for file in listing.files),
        FILE_VERSIONS_ENTRY: hash_strings(file.version for file in listing.files),
        "tokenizer": tokenizer_hash,
        **options.identity_settings(),
        **({} if words is None else {"words": words.model_dump(mode="json", exclude_none=True)}),
    }


def identity_hash(configuration: Configuration) -> str:
    """Return a short hash of the entries that determine the output."""
    decisive = {key: value for key, value in configuration.items() if key not in _ENTRIES_WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def claim_output(store: Store, configuration: Configuration) -> CorpusManifest | None:
    """Reserve the output for this build. Return the manifest if the same build is complete there already, else None.

    Raises:
        CorpusError: the output holds a corpus, complete or not, that was built from other inputs or with other options.
    """
    if store.size(MANIFEST_KEY) is not None:
        manifest = load_manifest(store)
        _check_same_configuration(store, manifest.options, configuration, "a complete corpus")
        return manifest
    if not store.put_if_absent(CONFIGURATION_KEY, json.dumps(configuration).encode()):
        _check_same_configuration(store, json.loads(store.get(CONFIGURATION_KEY)), configuration, "a half-built corpus")
    return None


def hash_splits(scanned: Sequence[ScanReceipt]) -> list[str]:
    """Return a short hash of the text of each split."""
    return [split.digest[:16] for split in scanned]


def check_text_unchanged(
    store: Store, manifest: CorpusManifest, splits: Sequence[InputSplit], scanned: Sequence[ScanReceipt]
) -> None:
    """Raise CorpusError if the text of the inputs changed since the complete corpus was built."""
    changed = name_changed_files(splits, hash_splits(scanned), manifest.options.get(SPLIT_HASHES_ENTRY))
    if changed:
        raise CorpusError(
            f"{store.uri} holds a complete corpus of other text: {changed} changed since it was built",
            remedy="give another folder with --out, or delete this corpus first",
        )


def name_changed_files(splits: Sequence[InputSplit], now: Sequence[str], then: object) -> str:
    """Return for a message the files of splits whose text hash has changed; empty if none has.

    `now`: hashes of the splits; `then`: hashes that the complete output stores, as JSON values.
    """
    before = then if isinstance(then, list) and len(then) == len(now) else [None] * len(now)
    changed = [split for split, one, other in zip(splits, now, before, strict=True) if one != other]
    files = list(dict.fromkeys(piece.file.uri for split in changed for piece in split.pieces))
    return f"{files[0]} or one of {len(files) - 1:,} others" if len(files) > 1 else "".join(files)


def check_skipped_records(store: Store, manifest: CorpusManifest, options: BuildOptions) -> None:
    """Raise CorpusError if the options refuse bad records but the complete corpus was built without some."""
    skipped = manifest.counts.get("skipped", 0)
    if skipped and options.on_bad_records == "error":
        raise CorpusError(
            f"{store.uri} holds a complete corpus from which {skipped:,} bad records were left out",
            remedy="give --on-bad-records skip, or another folder with --out",
        )


def check_provenance_patterns(listing: InputListing, options: BuildOptions) -> None:
    """Raise InputError if constant provenance is given for a pattern that matches no input."""
    uris = [file.uri for file in listing.files]
    unmatched = [] if options.provenance is None else options.provenance.unmatched_patterns(uris)
    if unmatched:
        raise InputError(
            f"--provenance has constants for inputs {unmatched[0]!r}, which match none of the {len(uris)} inputs "
            f"(the first is {uris[0]})",
            remedy="in the --provenance file, write `inputs` as a pattern of whole URIs, such as '*/wiki/*'",
        )


def _check_same_configuration(store: Store, stored: Configuration, requested: Configuration, content: str) -> None:
    lines = describe_differences(stored, requested, _ENTRIES_WITHOUT_EFFECT)
    if lines:
        raise CorpusError(
            "\n".join([f"{store.uri} holds {content} that was built in another way:", *lines]),
            remedy="give another --out or delete this corpus; to continue it, give the same inputs and options",
        )


def assemble_manifest(
    layout: BuildLayout,
    *,
    options: Configuration,
    tokenizer: Tokenizer,
    scanned: list[ScanReceipt],
    written: list[WriteReceipt],
    listing: InputListing,
    heldout_rule: HeldoutRule,
    origin: Origin,
    progress: ReportProgress,
) -> CorpusManifest:
    """Return the manifest of the shards that the tasks wrote, in the order of the splits. Reads the token counts.

    Raises:
        CorpusError: no document with a token is left for training; or none is left for evaluation, although text was to
            be held out.
    """
    # Training and held-out text must each have a token.
    train, heldout = [part.train for part in written], [part.heldout for part in written]
    if not any(part.shard for part in train):
        raise CorpusError(
            f"no document is left for training in {layout.output}",
            remedy="give more text, or a smaller --heldout",
        )
    # A rule that was taken from another corpus may hold nothing out of a small text.
    given = "heldout_rule" in options
    if heldout_rule.below and not given and not any(part.shard for part in heldout):
        raise CorpusError(
            f"no held-out text of {layout.output} has a token",
            remedy="use a tokenizer that was trained on such text, or give more text",
        )
    # The manifest holds the tables of blocks, the shards' digests, and how the corpus was built.
    fraction = float(str(options["heldout_fraction"]))
    shards = _shards_by_key("train", train) | _shards_by_key("heldout", heldout)
    files = tokenizer.save_files()
    return CorpusManifest(
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        heldout_fraction=fraction,
        train=concatenate_shard_tables(_shards_by_key("train", train)),
        heldout=concatenate_shard_tables(_shards_by_key("heldout", heldout)),
        unigram=_sum_unigram_counts(layout, len(written), tokenizer.vocab_size, progress),
        shard_sizes={key: shard.size for key, shard in shards.items()},
        shard_digests={key: shard.digest for key, shard in shards.items()},
        counts=_count_documents(scanned, written) | {"ignored_files": len(listing.left_out)},
        options={**options, SPLIT_HASHES_ENTRY: hash_splits(scanned)},
        document_lengths=tuple(sum(part.lengths[k] for part in train) for k in range(LENGTH_BINS)),
        tokenizer_files={f"{TOKENIZER_FOLDER}/{name}": digest(files[name]) for name in sorted(files)},
        skipped=_describe_skipped_records(scanned, listing),
        left_out=tuple(str(item) for item in listing.left_out[:MAX_LISTED_RECORDS]),
        provenance=_sidecars_by_key("train", train) | _sidecars_by_key("heldout", heldout),
        origin=_origin_with_value_counts(origin, train),
        loss=TextLoss.sum_of(part.loss for part in written),
    ).with_heldout_rule(heldout_rule)


def _describe_skipped_records(scanned: list[ScanReceipt], listing: InputListing) -> tuple[str, ...]:
    first = [record for split in scanned for record in split.first_skipped][:MAX_LISTED_RECORDS]
    return tuple(str(record) for record in with_line_numbers(first, listing.files))


def _origin_with_value_counts(inputs: Origin, train: list[PartSummary]) -> Origin | None:
    """Return `inputs` with the counts of provenance values in the training text; None if neither holds anything."""
    found = inputs.model_copy(update={"values": join_value_counts(part.values for part in train)})
    return found if found.values or found.prepared else None


def _shards_by_key(part: str, summaries: list[PartSummary]) -> dict[str, WrittenShard]:
    return {shard_key(part, i): summary.shard for i, summary in enumerate(summaries) if summary.shard}


def _sidecars_by_key(part: str, summaries: list[PartSummary]) -> dict[str, StoredFile]:
    return {sidecar_key(shard_key(part, i)): summary.sidecar for i, summary in enumerate(summaries) if summary.sidecar}


def _sum_unigram_counts(
    layout: BuildLayout, splits: int, vocab_size: int, progress: ReportProgress
) -> NDArray[np.int64]:
    total = np.zeros(vocab_size, dtype=np.int64)
    keys = [layout.unigram_key(index) for index in range(splits)]
    for done, counts in enumerate(parallel_map(layout.open_output().get, keys), start=1):
        total += np.frombuffer(counts, dtype=np.int64)
        progress(Progress("assembling", done, splits, done * total.nbytes, splits * total.nbytes))
    return total


def _count_documents(scanned: list[ScanReceipt], written: list[WriteReceipt]) -> dict[str, int]:
    encoded_by = sum((Counter(one.encoded_by) for one in written), Counter[str]())
    few = {
        "odd": sum(one.odd for one in scanned),
        NOT_CHOSEN_REASON: sum(one.not_chosen for one in scanned),
        "moved_sentences": sum(one.moved for one in written),
        "cut_texts": sum(one.cuts for one in written),
    }
    return {name: count for name, count in few.items() if count} | {
        "documents_read": sum(split.documents + split.empty + split.not_chosen for split in scanned),
        "empty": sum(split.empty for split in scanned),
        "skipped": sum(split.skipped for split in scanned),
        "replaced": sum(split.replaced for split in scanned),
        "duplicates": sum(split.duplicates for split in written),
        "without_tokens": sum(split.without_tokens for split in written),
        "train_text_bytes": sum(split.train.text_bytes for split in written),
        "heldout_text_bytes": sum(split.heldout.text_bytes for split in written),
        **{f"texts encoded by {library}": number for library, number in sorted(encoded_by.items())},
    }
