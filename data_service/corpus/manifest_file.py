"""manifest.json: the manifest as compact columnar JSON, with a hash of the exact bytes of its content.

The hash reveals a flipped byte even if the JSON can still be parsed. Large block tables are stored in binary objects of
their own (`data_service.corpus.block_columns`); then the JSON holds their digests and the corpus's fingerprint.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, model_validator

from data_service.corpus.block_columns import (
    MIN_BLOCKS_STORED_APART,
    StoredTable,
    describe_stored_table,
    open_table,
    write_columns,
)
from data_service.corpus.manifest import (
    CONFIGURATION_KEY,
    DTYPES,
    MANIFEST_KEY,
    BlockTable,
    CorpusManifest,
    CorpusPart,
    Digests,
    HeldoutRule,
    HexDigest,
    PairTexts,
    StoredFile,
    sidecar_key,
)
from data_service.corpus.origin import Origin
from data_service.corpus.words import Segmentation
from data_service.errors import CorpusError, damaged_corpus
from data_service.formats import NEWER_REMEDY, newer_version_message, open_envelope, wrap_in_envelope
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.tokenizers.loss import TextLoss

# A manifest is written in the lowest version that has all fields it uses. Version 2 added `provenance` and `origin`,
# 3 `parts` of a merged corpus, 4 block tables in objects of their own, 5 `HeldoutRule.clusters`, 6 `loss`.
NEWEST_MANIFEST_VERSION = 6
_FORMAT = "maskfleet-corpus"  # value of the key `format` in manifest.json


class _ManifestObject(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _InlineTable(_ManifestObject):  # a block table whose columns are in manifest.json itself
    shards: list[str]
    shard: list[NonNegativeInt]
    offset: list[NonNegativeInt]
    length: list[NonNegativeInt]
    tokens: list[NonNegativeInt]
    sentences: list[NonNegativeInt]
    documents: list[NonNegativeInt]
    digest: list[HexDigest]

    @model_validator(mode="after")
    def _check_columns(self) -> "_InlineTable":
        columns = (self.offset, self.length, self.tokens, self.sentences, self.documents, self.digest)
        if any(len(column) != len(self.shard) for column in columns):
            raise ValueError("the columns of a block table differ in length")
        if self.shard and max(self.shard) >= len(self.shards):
            raise ValueError(f"a block names shard {max(self.shard)}, but there are {len(self.shards)}")
        return self


class _ManifestContent(_ManifestObject):  # the fields are those of `CorpusManifest`
    tokenizer_hash: str
    vocab_size: NonNegativeInt
    heldout_fraction: float
    train: _InlineTable | StoredTable
    heldout: _InlineTable | StoredTable
    unigram: list[NonNegativeInt]
    shard_sizes: dict[str, NonNegativeInt]
    shard_digests: dict[str, HexDigest]
    counts: dict[str, int]
    options: dict[str, object]
    document_lengths: tuple[NonNegativeInt, ...]
    tokenizer_files: dict[str, HexDigest]
    heldout_rule: HeldoutRule | None = None
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    pairs: PairTexts | None = None
    words: Segmentation | None = None
    provenance: dict[str, StoredFile] = {}
    fingerprint: str = ""
    parts: tuple[CorpusPart, ...] = ()
    origin: Origin | None = None
    loss: TextLoss | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> "_ManifestContent":
        if len(self.unigram) != self.vocab_size:
            raise ValueError(f"there are {len(self.unigram)} unigram counts for {self.vocab_size} token ids")
        shards = {*self.train.shards, *self.heldout.shards}
        if shards != set(self.shard_sizes) or shards != set(self.shard_digests):
            raise ValueError("the shards that have sizes and hashes are not the shards of the block tables")
        if self.provenance and set(self.provenance) != {sidecar_key(shard) for shard in shards}:
            raise ValueError("the listed provenance sidecars do not belong to the listed shards")
        for table in (self.train, self.heldout):
            if isinstance(table, StoredTable):
                continue
            for shard, offset, length in zip(table.shard, table.offset, table.length, strict=True):
                if offset + length > self.shard_sizes[table.shards[shard]]:
                    raise ValueError(f"a block extends past the end of its shard {table.shards[shard]}")
        return self


def dump_manifest(manifest: CorpusManifest) -> bytes:
    """Return the bytes of manifest.json. The same manifest always gives the same bytes."""
    apart = _stores_columns_apart(manifest)
    content: dict[str, object] = {
        "tokenizer_hash": manifest.tokenizer_hash,
        "vocab_size": manifest.vocab_size,
        "heldout_fraction": manifest.heldout_fraction,
        "train": _dump_table(manifest.train, "train", apart=apart),
        "heldout": _dump_table(manifest.heldout, "heldout", apart=apart),
        "unigram": manifest.unigram.tolist(),
        "shard_sizes": manifest.shard_sizes,
        "shard_digests": manifest.shard_digests,
        "counts": manifest.counts,
        "options": manifest.options,
        "document_lengths": manifest.document_lengths,
        "tokenizer_files": manifest.tokenizer_files,
    }
    if manifest.heldout_rule is not None:
        content["heldout_rule"] = manifest.heldout_rule.as_json()
    if manifest.pairs is not None:
        content["pairs"] = asdict(manifest.pairs)
    if manifest.words is not None:
        content["words"] = manifest.words.model_dump(mode="json", exclude_none=True)
    if apart:
        content["fingerprint"] = manifest.fingerprint
    if manifest.provenance:
        content["provenance"] = {key: asdict(file) for key, file in manifest.provenance.items()}
    if manifest.parts:
        content["parts"] = [asdict(part) for part in manifest.parts]
    if manifest.origin is not None:
        content["origin"] = manifest.origin.model_dump(mode="json")
    if manifest.loss is not None:
        content["loss"] = manifest.loss.model_dump(mode="json")
    # Older versions of Maskfleet reject these keys, so empty lists are left out.
    content |= {key: names for key in ("skipped", "left_out") if (names := getattr(manifest, key))}
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return wrap_in_envelope(_FORMAT, _lowest_version(content, manifest.heldout_rule), body)


def parse_manifest(data: bytes, store: Store) -> CorpusManifest:
    """Return the manifest in `data`, the bytes of manifest.json at the corpus root `store`.

    Raises:
        CorpusError: the bytes are damaged, not a manifest, or written by a newer version of Maskfleet.
    """
    place = f"{store.uri.rstrip('/')}/{MANIFEST_KEY}"
    try:
        stored = open_envelope(_FORMAT, data)
    except ValueError as error:
        raise damaged_corpus(place, str(error)) from error
    if stored.version > NEWEST_MANIFEST_VERSION:
        raise CorpusError(newer_version_message(place), remedy=NEWER_REMEDY)
    try:
        content = _ManifestContent.model_validate_json(stored.body)
    except ValidationError as error:
        raise damaged_corpus(place, str(error.errors()[0]["msg"])) from error
    apart = [isinstance(table, StoredTable) for table in (content.train, content.heldout)]
    used = {
        "parts": content.parts,
        "provenance": content.provenance or content.origin,
        "fingerprint": any(apart),
        "loss": content.loss,
    }
    if stored.version != _lowest_version(used, content.heldout_rule) or any(apart) != bool(content.fingerprint):
        raise damaged_corpus(place, f"its fields do not belong to manifest version {stored.version}")
    return replace(_to_manifest(content, store), digest=stored.digest)


def _lowest_version(content: Mapping[str, object], rule: HeldoutRule | None) -> int:
    """Return the first manifest version that has all fields used in `content` and `rule`."""
    if content.get("loss"):
        return NEWEST_MANIFEST_VERSION
    if rule is not None and rule.clusters:
        return 5
    if content.get("fingerprint"):
        return 4
    if content.get("parts"):
        return 3
    return 2 if content.get("provenance") or content.get("origin") else 1


def save_manifest(store: Store, manifest: CorpusManifest) -> None:
    """Write the manifest at the corpus root `store`, which completes the corpus. Large block tables are written first,
    to objects of their own."""
    if _stores_columns_apart(manifest):
        for split, table in (("train", manifest.train), ("heldout", manifest.heldout)):
            write_columns(store, table, describe_stored_table(table, split))
    store.put(MANIFEST_KEY, dump_manifest(manifest))


def with_digest(manifest: CorpusManifest) -> CorpusManifest:
    """Return the manifest with `digest` set to what `save_manifest` will store."""
    return replace(manifest, digest=open_envelope(_FORMAT, dump_manifest(manifest)).digest)


def _stores_columns_apart(manifest: CorpusManifest) -> bool:
    """Return whether the block tables are stored in objects of their own, as binary columns."""
    return len(manifest.train) + len(manifest.heldout) >= MIN_BLOCKS_STORED_APART


def load_manifest(store: Store) -> CorpusManifest:
    """Return the manifest of the corpus at the root of `store`.

    Raises:
        CorpusError: there is no corpus, or its manifest is damaged or written by a newer version.
        StoreError: the store cannot be read.
    """
    try:
        data = store.get(MANIFEST_KEY)
    except KeyMissing as error:
        raise no_corpus_error(store.uri) from error
    return parse_manifest(data, store)


def no_corpus_error(uri: str) -> CorpusError:
    return CorpusError(
        f"no corpus at {uri}: it has no {MANIFEST_KEY}",
        remedy="check the URI; if a build was interrupted, run the same `maskfleet corpus build` again",
    )


def _dump_table(table: BlockTable, split: str, *, apart: bool) -> dict[str, object]:
    if apart:
        return describe_stored_table(table, split).model_dump()
    columns = {name: table.columns[name].tolist() for name in DTYPES if name != "digest"}
    return {"shards": table.shards, **columns, "digest": list(table.digest)}


def _to_table(table: _InlineTable | StoredTable, store: Store) -> BlockTable:
    if isinstance(table, StoredTable):
        return open_table(store, table)
    columns: dict[str, NDArray[Any]] = {
        name: np.array(getattr(table, name), dtype=kind) for name, kind in DTYPES.items() if name != "digest"
    }
    columns["digest"] = Digests.from_hex(table.digest).raw
    return BlockTable(len(table.shard), tuple(table.shards), columns)


def _to_manifest(content: _ManifestContent, store: Store) -> CorpusManifest:
    fields = {name: value for name, value in vars(content).items() if name != "fingerprint"}
    converted: dict[str, Any] = {
        "train": _to_table(content.train, store),
        "heldout": _to_table(content.heldout, store),
        "unigram": np.array(content.unigram, dtype=np.int64),
    }
    return CorpusManifest(**(fields | converted), recorded=content.fingerprint)


def claim_output(store: Store, configuration: Mapping[str, object]) -> None:
    """Reserve the output for the corpus that `configuration` describes. An unfinished corpus of the same configuration
    may be there.

    Raises CorpusError: the output holds a complete corpus, or an unfinished one of another configuration.
    """
    described = json.dumps(configuration).encode()
    if store.size(MANIFEST_KEY) is not None:
        raise CorpusError(f"{store.uri} holds a corpus already", remedy="give another folder with --out")
    if not store.put_if_absent(CONFIGURATION_KEY, described) and store.get(CONFIGURATION_KEY) != described:
        raise CorpusError(
            f"{store.uri} holds the unfinished corpus of another build or merge",
            remedy="give another folder with --out, or delete this one",
        )
