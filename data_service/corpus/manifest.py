"""The corpus manifest, which lists every block with its byte range and hash; and the keys of files during a build.

A corpus is complete once its manifest is written. Then everything under `build/` is deleted.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, StringConstraints

from data_service.corpus.origin import Origin
from data_service.corpus.words import Segmentation
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.loss import TextLoss

MIN_DOCUMENTS_TO_HASH_TOKENS = 64
"""Smallest number of held-out documents with which a build sets `HeldoutRule.by_tokens`, unless the held-out rule is
given."""

HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]  # a 16-byte blake2b hash

BUILD_FOLDER = "build/"  # temporary files of an unfinished build
CONFIGURATION_KEY = "build/configuration.json"  # which build, or merge, the output folder is reserved for
TOKENIZER_FOLDER = "tokenizer"
SHARD_FOLDERS = ("train/", "heldout/", "provenance/")  # folders of shards by split, and of sidecars


@dataclass(frozen=True)
class BuildLayout:
    """The store keys that the tasks of one build read and write. The layout is sent to the workers with each task.

    Attributes:
        output: URI of the corpus.
        build: hash of the configuration. Keys under `build/` contain it, so that this build never reads files that a
            late task of an abandoned build writes.

    An input split is the part of the input that one task reads.
    """

    output: str
    build: str

    def open_output(self) -> Store:
        """Return the store at the corpus root."""
        return open_store(self.output)

    def document_hashes_key(self, split: int) -> str:
        """Return the key of the sorted document hashes of input split number `split`."""
        return f"{BUILD_FOLDER}{self.build}/hashes/{split:06d}.bin"

    def duplicate_documents_key(self, partition: int) -> str:
        """Return the key of the list of duplicate documents whose hashes lie in one partition of the hash range."""
        return f"{BUILD_FOLDER}{self.build}/drops/{partition:03d}.bin"

    def unigram_key(self, split: int) -> str:
        """Return the key of the token counts of an input split's training shard: [vocab_size] int64."""
        return f"{BUILD_FOLDER}{self.build}/unigrams/{split:06d}.bin"

    def words_key(self, name: str) -> str:
        """Return the key of the workers' copy of a word file: `dictionary`, `user_words` or `lexicon`."""
        return f"{BUILD_FOLDER}{self.build}/words/{name}"

    def document_id_hashes_key(self, split: int) -> str:
        """Return the key of the sorted hashes of the document ids of an input split."""
        return f"{BUILD_FOLDER}{self.build}/ids/{split:06d}.bin"

    def receipt_key(self, stage: str, task: int) -> str:
        """Return the key of the file that records the result of a finished task of a build stage."""
        return f"{BUILD_FOLDER}{self.build}/receipts/{stage}/{task:06d}.json"


def shard_stem(split: int) -> str:
    """Return an input split's number as it is written in the names of its shards and in their tar members' names."""
    return f"{split:06d}"


def shard_key(split_name: str, split: int) -> str:
    """Return the key of the shard that input split number `split` adds to `split_name`, train or heldout."""
    return f"{split_name}/{shard_stem(split)}.tar"


def sidecar_key(shard: str) -> str:
    """Return the key of the provenance file (sidecar) of the shard at key `shard`."""
    return f"provenance/{shard.removesuffix('.tar')}.parquet"


@dataclass(frozen=True)
class StoredFile:
    """A file of a corpus. `size`: in bytes; `digest`: blake2b hash of the file's bytes."""

    size: NonNegativeInt
    digest: HexDigest


@dataclass(frozen=True)
class CorpusPart:
    """A corpus whose shards a merged corpus uses. `uri`: root of that corpus; `digest`: digest of its manifest."""

    uri: str
    digest: str


MANIFEST_KEY = "manifest.json"
MANIFEST_START = b'{"format":"maskfleet-corpus",'  # first bytes of every manifest.json


DTYPES: dict[str, str] = {
    "shard": "<i4",
    "offset": "<i8",
    "length": "<i8",
    "tokens": "<i8",
    "sentences": "<i8",
    "documents": "<i8",
    "digest": "|V16",
}
"""The columns of a block table, in order, and their dtypes."""


class Digests(Sequence[str]):
    """The hex digests of B blocks. They are kept as `raw`, [B] of 16 bytes each: text takes six times the memory."""

    def __init__(self, raw: NDArray[np.void]) -> None:
        self.raw = raw

    @classmethod
    def from_hex(cls, texts: Sequence[str]) -> "Digests":
        """Return the digests written as 32 hexadecimal digits each."""
        return cls(np.frombuffer(bytes.fromhex("".join(texts)), dtype=DTYPES["digest"]))

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Digests": ...
    def __getitem__(self, index: int | slice) -> "str | Digests":
        return Digests(self.raw[index]) if isinstance(index, slice) else self.raw[index].tobytes().hex()


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The table of one split's B blocks, one column per attribute. 500 billion tokens make two million blocks.

    Attributes:
        blocks: number of blocks, B.
        shards: keys of the shards, relative to the corpus root.
        columns: the columns by name, as in `DTYPES`. Those of a large corpus are read when they are first used
            (`data_service.corpus.block_columns`).
    """

    blocks: int
    shards: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return self.blocks

    @property
    def shard(self) -> NDArray[np.int32]:
        """[B] int32, index of the block's shard in `shards`."""
        return self.columns["shard"]

    @property
    def offset(self) -> NDArray[np.int64]:
        """[B] int64, byte offset of the block's first tar header in its shard."""
        return self.columns["offset"]

    @property
    def length(self) -> NDArray[np.int64]:
        """[B] int64, bytes from `offset` to the end of the block's last tar member (padding included)."""
        return self.columns["length"]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[B] int64, number of tokens."""
        return self.columns["tokens"]

    @property
    def sentences(self) -> NDArray[np.int64]:
        """[B] int64, number of sentences."""
        return self.columns["sentences"]

    @property
    def documents(self) -> NDArray[np.int64]:
        """[B] int64, number of documents."""
        return self.columns["documents"]

    @property
    def digest(self) -> Digests:
        """B hex digests (blake2b, 16 bytes), each of one block's `length` bytes."""
        return Digests(self.columns["digest"])

    @cached_property
    def first_block_by_shard(self) -> dict[str, int]:
        """Number of the first block of each shard, by key."""
        shards, first = np.unique(self.shard, return_index=True)
        return {self.shards[shard]: int(block) for shard, block in zip(shards, first, strict=True)}

    def block_shard_key(self, index: int) -> str:
        """Return the key of the shard that holds block `index`, relative to the corpus root."""
        return self.shards[int(self.shard[index])]

    def block_location(self, index: int) -> str:
        """Return where block `index` lies, as text for messages: shard, block number in the split, byte range."""
        start = int(self.offset[index])
        return f"{self.block_shard_key(index)}, block {index}, bytes {start} to {start + int(self.length[index])}"


@dataclass(frozen=True)
class HeldoutRule:
    """The rule by which text was held out of a corpus.

    Attributes:
        unit: unit that is held out: a whole document, or a stretch: a run of its paragraphs (in a long paragraph, of
            its sentences).
        below: bound for the low 64 bits of a hash. A document is held out if those of its own hash are below the bound;
            a stretch is held out if those of its last paragraph's hash are.
        length: mean length of a stretch in bytes.
        trained: low 64 bits of the hashes of paragraphs with which too many stretches end. These stretches are trained
            on, although the bits are below the bound.
        by_tokens: whether documents with unknown tokens are split by the hash of their tokens, so that documents that
            differ only in unknown words are on the same side. Only corpora of many documents do so.
        clusters: digest of the clusters of near duplicates that the prepared documents name; empty if they name none.
            A document in a cluster is hashed by the cluster's name, and no stretches are taken out of it.
    """

    unit: Literal["document", "stretch"]
    below: int
    length: int = 0
    trained: tuple[int, ...] = ()
    by_tokens: bool = False
    clusters: str = ""

    @classmethod
    def from_fraction(cls, fraction: float) -> Self:
        """Return the rule that holds out whole documents, each with probability `fraction` by its hash."""
        return cls("document", math.ceil(fraction * (1 << 64)))

    def as_json(self) -> dict[str, object]:
        """Return the rule as a JSON object, without an empty `clusters`, so that older manifests keep their bytes."""
        found = asdict(self)
        return found if self.clusters else {name: value for name, value in found.items() if name != "clusters"}

    def holds_out(self, low_hash_word: int) -> bool:
        """Return whether text whose hash has these low 64 bits is held out."""
        return low_hash_word < self.below and low_hash_word not in self.trained


@dataclass(frozen=True)
class PairTexts:
    """The texts of an example in a corpus of pairs. Every document is an example.

    Its sentences are a query, a positive and `negatives` negatives, each a whole text.
    """

    negatives: int

    @property
    def text_names(self) -> tuple[str, ...]:
        """Name of each text of an example, in order."""
        return ("query", "positive", *(f"negative {number + 1}" for number in range(self.negatives)))


@dataclass(frozen=True)
class CorpusManifest:
    """The manifest of a complete corpus.

    Attributes:
        tokenizer_hash: hash of the tokenizer with which the corpus was built (`Tokenizer.hash`).
        vocab_size: number of ids of that tokenizer.
        heldout_fraction: requested share of documents (by document hash) in the held-out split.
        train, heldout: tables of the blocks of each split.
        unigram: [vocab_size] int64, token counts of the training split.
        shard_sizes, shard_digests: size in bytes and hash of each whole shard, by key.
        counts: numbers of documents read, duplicates dropped and the like, for `corpus stats`.
        options: inputs and options of the build, for information and for continuing it.
        document_lengths: numbers of training documents by length; entry k counts those of 2**k to 2**(k + 1) - 1
            tokens.
        skipped: first hundred bad records that were skipped: file, line or row, and reason.
        left_out: first hundred files among the inputs that were not read, and reasons.
        tokenizer_files: hashes (blake2b, 16 bytes) of the files of the tokenizer's copy, by key.
        heldout_rule: rule by which text was held out; None if `heldout_fraction` of the documents was held out by
            their hash (`effective_heldout_rule`).
        pairs: texts of an example in a corpus of pairs; None in a corpus of plain text.
        words: segmentation that decided where stored units begin; None if no units are stored.
        provenance: sizes and hashes of the sidecars that say where documents come from, by key; empty in a corpus that
            was built without provenance.
        recorded: fingerprint as read from manifest.json; empty if it must be computed.
        parts: corpora in which the shards lie, if the corpus was merged (`parts.py`).
        origin: where the text is from, and how it was prepared; None if neither provenance nor outputs of `corpus
            prepare` say it, and in a merged corpus, since the manifests of its parts say it.
        loss: characters that the tokenizer cannot represent; None in a corpus of an older build, which has no count.
        digest: sha256 (hex) of the manifest's whole content, so also of counts, options and sidecars, which
            `fingerprint` does not cover; empty until it is written.
    """

    tokenizer_hash: str
    vocab_size: int
    heldout_fraction: float
    train: BlockTable
    heldout: BlockTable
    unigram: NDArray[np.int64]
    shard_sizes: dict[str, int]
    shard_digests: dict[str, str]
    counts: dict[str, int]
    options: dict[str, object]
    document_lengths: tuple[int, ...] = ()
    tokenizer_files: dict[str, str] = field(default_factory=dict)
    heldout_rule: HeldoutRule | None = None
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    pairs: PairTexts | None = None
    words: Segmentation | None = None
    provenance: dict[str, StoredFile] = field(default_factory=dict)
    recorded: str = field(default="", compare=False)
    parts: tuple[CorpusPart, ...] = ()
    origin: Origin | None = None
    loss: TextLoss | None = None
    digest: str = field(default="", compare=False)

    @property
    def effective_heldout_rule(self) -> HeldoutRule:
        """The stored held-out rule, else that of `heldout_fraction` (`by_tokens` if many documents are held out)."""
        if self.heldout_rule is not None:
            return self.heldout_rule
        many = int(self.heldout.documents.sum()) >= MIN_DOCUMENTS_TO_HASH_TOKENS
        return replace(HeldoutRule.from_fraction(self.heldout_fraction), by_tokens=many)

    def with_heldout_rule(self, rule: HeldoutRule) -> Self:
        """Return the manifest with this held-out rule, which is stored unless `heldout_fraction` implies it."""
        without = replace(self, heldout_rule=None)
        return without if without.effective_heldout_rule == rule else replace(self, heldout_rule=rule)

    @property
    def may_have_unknown_tokens(self) -> bool:
        """Whether the corpus may contain the unknown token; only then `HeldoutRule.by_tokens` matters."""
        return self.loss is None or bool(self.loss.lost.get("unknown"))

    @property
    def keeps_white_space(self) -> bool:
        """Whether documents keep their white space. Corpora of older versions, or built with `lines: join`, join a
        document's lines with one space."""
        return self._rules_version >= 3 and self.options.get("lines") != "join"

    @property
    def _rules_version(self) -> int:  # version of the rules of `corpus build`
        rules = self.options.get("rules")
        return rules if isinstance(rules, int) else 1

    @property
    def word_rules_version(self) -> int:
        """Version, 1 or 2, of the rules in `data_service.tokenizers.words` with which the corpus was built."""
        return 2 if self._rules_version >= 2 else 1

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides the samples of training: blocks, shards, tokenizer, word-start rules.

        It does not cover where the text came from (`options`, `counts`), because the same tokens are the same data.
        """
        return self.recorded or self.computed_fingerprint

    @cached_property
    def computed_fingerprint(self) -> str:
        """The fingerprint, computed from all columns of both block tables."""
        content = hashlib.sha256()
        identity: list[object] = [self.tokenizer_hash, self.vocab_size, self.shard_sizes, self.shard_digests]
        if self.word_rules_version > 1:  # version 1 is left out, so that older corpora keep their fingerprints
            identity.append({"words": self.word_rules_version})
        if self.pairs is not None:
            identity.append({"pairs": self.pairs.negatives})
        if self.words is not None:
            identity.append({"segmentation": self.words.model_dump(mode="json", exclude_none=True)})
        content.update(json.dumps(identity, sort_keys=True).encode())
        for table in (self.train, self.heldout):
            content.update(json.dumps([len(table), table.shards, list(table.digest)]).encode())
            for column in (table.shard, table.offset, table.length, table.tokens, table.sentences, table.documents):
                content.update(column.astype("<i8").tobytes())
        content.update(self.unigram.astype("<i8").tobytes())
        return content.hexdigest()


def make_block_table(
    rows: list[tuple[int, int, int, int, int, int]], hex_digests: list[str], shards: list[str]
) -> BlockTable:
    """Return a table from rows of (shard, offset, length, tokens, sentences, documents), in block order."""
    numbers = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    columns: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(column, dtype=DTYPES[name]) for name, column in zip(DTYPES, numbers, strict=False)
    }
    return BlockTable(len(rows), tuple(shards), columns | {"digest": Digests.from_hex(hex_digests).raw})
