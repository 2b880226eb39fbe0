"""What a corpus is built from and how. It is written first, so that only the same build continues a
half-built corpus.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from data_service.corpus.manifest import CONFIGURATION, MANIFEST, CorpusManifest
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.words import Segmentation
from data_service.errors import CorpusError, InputError
from data_service.ingest.inputs import InputListing
from data_service.ingest.options import BuildOptions
from data_service.ingest.scan import Scanned
from data_service.ingest.splits import Split
from data_service.store.base import Store

RULES = 2  # goes up whenever the same inputs and options would give other bytes than before

VERSIONS = "input_versions"
CONTENT = "input_content"
_UNDECIDED = ("inputs", VERSIONS, CONTENT)

Configuration = Mapping[str, object]


def configuration(
    patterns: list[str],
    listing: InputListing,
    tokenizer_hash: str,
    options: BuildOptions,
    words: Segmentation | None = None,
) -> Configuration:
    """Everything that decides the bytes of a corpus, ready for JSON; and two entries that do not.

    `inputs` is there for people to read. `input_versions` changes when a file is written again, though its text may be
    the same; only reading it shows that. So receipts name the versions that they were made from, and a corpus holds
    hashes of the text that it was built from (`input_content`, see `refuse_other_text`).
    """
    names = json.dumps([[file.uri, file.size] for file in listing.files])
    versions = json.dumps([file.version for file in listing.files])
    return {
        "rules": RULES,
        "inputs": patterns,
        "input_files": len(listing.files),
        "input_bytes": sum(file.size for file in listing.files),
        "input_listing": hashlib.sha256(names.encode()).hexdigest(),
        VERSIONS: hashlib.sha256(versions.encode()).hexdigest(),
        "tokenizer": tokenizer_hash,
        **options.identity(),
        **({} if words is None else {"words": words.model_dump(mode="json", exclude_none=True)}),
    }


def identity(wanted: Configuration) -> str:
    """A short hash of what decides the output."""
    decisive = {key: value for key, value in wanted.items() if key not in _UNDECIDED}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def claim(store: Store, wanted: Configuration) -> CorpusManifest | None:
    """Reserve the output for this build. Returns the manifest if the same build is complete there already.

    Raises:
        CorpusError: a corpus is there, complete or not, that was built from something else or in another way.
    """
    if store.size(MANIFEST) is not None:
        manifest = load_manifest(store)
        _refuse_difference(store, manifest.options, wanted, "a complete corpus")
        return manifest
    if not store.put_if_absent(CONFIGURATION, json.dumps(wanted).encode()):
        _refuse_difference(store, json.loads(store.get(CONFIGURATION)), wanted, "a half-built corpus")
    return None


def content(scanned: Sequence[Scanned]) -> list[str]:
    """A short hash of the text of each split."""
    return [split.digest[:16] for split in scanned]


def refuse_other_text(
    store: Store, manifest: CorpusManifest, splits: Sequence[Split], scanned: Sequence[Scanned]
) -> None:
    """Raises CorpusError unless the complete corpus was built from the text that was scanned now."""
    now, there = content(scanned), manifest.options.get(CONTENT)
    then = there if isinstance(there, list) and len(there) == len(now) else [None] * len(now)
    changed = [split for split, digest, before in zip(splits, now, then, strict=True) if digest != before]
    if not changed:
        return
    files = list(dict.fromkeys(piece.file.uri for split in changed for piece in split.pieces))
    among = f"{files[0]} or one of {len(files) - 1:,} others" if len(files) > 1 else files[0]
    raise CorpusError(
        f"{store.uri} holds a complete corpus of other text: {among} changed since it was built",
        remedy="build into another place, or delete this corpus first",
    )


def refuse_skipped(store: Store, manifest: CorpusManifest, options: BuildOptions) -> None:
    """Raises CorpusError where bad records are to be refused and a complete corpus was built without some."""
    skipped = manifest.counts.get("skipped", 0)
    if skipped and options.on_bad_records == "error":
        raise CorpusError(
            f"{store.uri} holds a complete corpus that {skipped:,} bad records were left out of",
            remedy="give --on-bad-records skip, or build into another place",
        )


def refuse_own_output(store: Store, listing: InputListing) -> None:
    """Raises InputError where the output holds inputs: a second build would read what the first wrote."""
    inside = next(
        (file.uri for file in listing.files if file.uri.startswith(store.uri.rstrip("/") + "/")), None
    )
    if inside is not None:
        raise InputError(
            f"the output {store.uri} holds the input {inside}",
            remedy="write the corpus to a folder of its own",
        )


def _refuse_difference(store: Store, there: Configuration, wanted: Configuration, what: str) -> None:
    keys = [key for key in {**there, **wanted} if key not in _UNDECIDED and there.get(key) != wanted.get(key)]
    if not keys:
        return
    lines = [f"  {key}: there {there.get(key)!r}, asked for {wanted.get(key)!r}" for key in keys]
    if "rules" in keys:
        lines.append("  (another version of maskfleet built it by other rules; it can still be read)")
    raise CorpusError(
        "\n".join([f"{store.uri} holds {what} that was built in another way:", *lines]),
        remedy="build into another place or delete this one; to continue it, give its inputs and options",
    )
