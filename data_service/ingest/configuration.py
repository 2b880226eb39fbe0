"""What a corpus is built from and how. Written first: only the same build continues a half-built one."""

import hashlib
import json
from collections.abc import Mapping

from data_service.errors import CorpusError, InputError
from data_service.ingest.inputs import Listing
from data_service.ingest.layout import CONFIGURATION
from data_service.ingest.options import BuildOptions
from data_service.shards.manifest import MANIFEST, Manifest
from data_service.shards.manifest_file import load_manifest
from data_service.store.base import Store

RULES = 2  # goes up whenever the same inputs and options would give other bytes than before

Configuration = Mapping[str, object]


def configuration(
    patterns: list[str], listing: Listing, tokenizer_hash: str, options: BuildOptions
) -> Configuration:
    """Everything that decides the bytes of a corpus, ready for JSON; `inputs` is there for the reader."""
    names = json.dumps([[file.uri, file.size] for file in listing.files])
    return {
        "rules": RULES,
        "inputs": patterns,
        "input_files": len(listing.files),
        "input_bytes": sum(file.size for file in listing.files),
        "input_listing": hashlib.sha256(names.encode()).hexdigest(),
        "tokenizer": tokenizer_hash,
        **options.identity(),
    }


def identity(wanted: Configuration) -> str:
    """A short hash of what decides the output."""
    decisive = {key: value for key, value in wanted.items() if key != "inputs"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def claim(store: Store, wanted: Configuration) -> Manifest | None:
    """Make the place ours for this build. The manifest, if the same build is complete there already.

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


def refuse_own_output(store: Store, listing: Listing) -> None:
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
    keys = [key for key in {**there, **wanted} if key != "inputs" and there.get(key) != wanted.get(key)]
    if not keys:
        return
    lines = [f"  {key}: there {there.get(key)!r}, asked for {wanted.get(key)!r}" for key in keys]
    raise CorpusError(
        "\n".join([f"{store.uri} holds {what} that was built in another way:", *lines]),
        remedy="build into another place or delete this one; to continue it, give its inputs and options",
    )
