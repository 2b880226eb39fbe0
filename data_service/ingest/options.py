"""The options of a build. All but three of them, with the text and the tokenizer, determine the corpus's bytes."""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from data_service.corpus.manifest import HeldoutRule
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.words import WordOptions
from data_service.ingest.encodings import UTF_8, python_encoding_name
from data_service.ingest.sentences import Language
from data_service.tokenizers.files import TokenizerRules
from data_service.tokenizers.loss import LossKind

MIB = 1 << 20
# Tokens of a full block. A read is 0.6 MB; a batch of 8,192 rows takes 270 reads (`data_service.stream.statistics`).
BLOCK_TOKENS = 1 << 18


class PairFields(BaseModel):
    """The fields of a record that hold the texts of an example in a corpus of pairs.

    Attributes:
        query, positive: names of fields that hold one text each.
        negatives: names of fields that hold a text or a list of texts. The first `count` of these texts are used.
        count: number of negatives of every example. A record with fewer is bad.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str = "query"
    positive: str = "positive"
    negatives: tuple[str, ...] = Field(default=("negatives",), min_length=1)
    count: NonNegativeInt = 0


class BuildOptions(BaseModel):
    """Options of `build_corpus`. All but `workers`, `on_bad_records` and `accept_loss` determine the output.

    Attributes:
        text_field: field of a JSON line, or column of a table (CSV, TSV, Parquet, Arrow), that holds the document.
        words: options for finding words and other units, for masking; None: the tokenizer says where words begin.
        provenance: fields that tell where a document comes from, stored in sidecars; None: not stored.
        sentences: language whose rules decide where sentences end; "any": rules for all languages.
        lines: keep: a document's white space is encoded as it is; join: its lines are joined by one space first, as
            fairseq does (blank lines and white space at the ends of lines are left out).
        tokenizer_rules: which rules apply if the tokenizer's file and class disagree (`data_service.tokenizers.load`).
        accept_loss: kinds of loss (`data_service.tokenizers.loss`) that are accepted even if much text is lost.
        pairs: fields from which a corpus of pairs is built; None for a corpus of text.
        txt_documents: documents in .txt files: one document per file, or documents separated by blank lines.
        encoding: encoding of text files, CSV and JSON lines, by any name that Python knows. A byte order mark overrides
            it.
        delimiter: delimiter between the columns of CSV and TSV; None: comma or tab, or another one that the first line
            shows.
        on_bad_bytes: treatment of text that is not in its encoding: refuse it, or replace the bad bytes by U+FFFD.
        on_bad_records: treatment of a record that cannot be used (broken JSON, a missing field, another type, text that
            is not UTF-8, a document too long): refuse it, or skip it, count it and list the first hundred. If no record
            is bad, both give the same corpus, so a build may be continued with the other setting.
        heldout_fraction: share of documents, by hash of their text, that is held out for evaluation; may be 0.
        heldout_rule: held-out rule of another corpus, used however little text it holds out, so that both can be
            merged; None: the rule follows from the share and the amount of text.
        block_tokens: largest number of tokens in a block, except that a longer document is a block of its own.
        split_bytes: bytes of text that one task reads and one shard holds; small corpora are cut finer.
        max_document_bytes: size of the longest document that is accepted. A document must fit in memory and in a block.
        workers: number of workers: 0 or 1 for this process alone, more for Ray. It never changes the output.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text_field: str = "text"
    pairs: PairFields | None = None
    words: WordOptions | None = None
    provenance: ProvenanceOptions | None = None
    sentences: Language = "any"
    lines: Literal["keep", "join"] = "keep"
    accept_loss: frozenset[LossKind] = frozenset()
    tokenizer_rules: TokenizerRules = "agreeing"
    txt_documents: Literal["file", "blank_line"] = "file"
    encoding: str = UTF_8
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    on_bad_bytes: Literal["error", "replace"] = "error"
    on_bad_records: Literal["error", "skip"] = "error"
    heldout_fraction: float = Field(default=0.0005, ge=0.0, lt=1.0)
    heldout_rule: HeldoutRule | None = None
    block_tokens: int = Field(default=BLOCK_TOKENS, ge=1)
    split_bytes: int = Field(default=64 * MIB, ge=4096)
    max_document_bytes: int = Field(default=16 * MIB, ge=1)
    workers: int = Field(default=1, ge=0)

    @field_validator("encoding")
    @classmethod
    def _normalise_encoding(cls, name: str) -> str:
        return python_encoding_name(name)

    @field_validator("delimiter")
    @classmethod
    def _check_delimiter(cls, delimiter: str | None) -> str | None:
        if delimiter is not None and delimiter in '"\r\n':
            raise ValueError("quotation marks and line ends cannot be delimiters of columns")
        return delimiter

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if self.pairs is not None and self.words is not None:
            raise ValueError("words are stored only for running text, but this is a corpus of pairs")
        return self

    def identity_settings(self) -> dict[str, object]:
        """Return the options that determine the output as JSON values, without `words` and `tokenizer_rules`: the
        build's configuration holds the segmentation and the tokenizer's hash instead."""
        without = {"workers", "on_bad_records", "words", "accept_loss", "tokenizer_rules"}
        # Defaults of these later options are left out, because older corpora have no such entries.
        later = ("pairs", "provenance", "heldout_rule", "encoding", "delimiter", "sentences")
        without |= {name for name in later if getattr(self, name) == BuildOptions.model_fields[name].default}
        found = self.model_dump(mode="json", exclude=without)
        if self.heldout_rule is not None and not self.heldout_rule.clusters:
            del found["heldout_rule"]["clusters"]
        return found

    def text_to_encode(self, text: str) -> str:
        """Return the form of a document's or example's text that the tokenizer gets (option `lines`)."""
        if self.lines == "keep":
            return text
        return " ".join(filter(None, map(str.strip, text.split("\n"))))

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Names of the fields or columns that each record must have."""
        if self.pairs is None:
            return (self.text_field, *self.word_fields)
        negatives = self.pairs.negatives if self.pairs.count else ()
        return tuple(dict.fromkeys((self.pairs.query, self.pairs.positive, *negatives)))

    @property
    def metadata_fields(self) -> tuple[str, ...] | None:
        """Fields to read in addition to the text; None: only the text, because a corpus stores nothing else."""
        return None

    @property
    def word_fields(self) -> tuple[str, ...]:
        """Name of the field that holds a document's words; empty if none does."""
        field = None if self.words is None else self.words.input_field
        return () if field is None else (field,)

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Names of the fields or columns that are read if they are there: those of provenance."""
        columns = () if self.provenance is None else self.provenance.columns
        return tuple(name for name in columns if name not in self.required_fields)

    @property
    def has_ids(self) -> bool:
        """Whether documents have ids, which must be unique."""
        return self.provenance is not None and self.provenance.id is not None


def describe_differences(
    stored: Mapping[str, object], requested: Mapping[str, object], ignored: Sequence[str] = ()
) -> list[str]:
    """Return a line for each entry in which the existing output differs from the requested one.

    `ignored`: entries that may differ.
    """
    keys = [key for key in {**stored, **requested} if key not in ignored and stored.get(key) != requested.get(key)]
    lines = [f"  {key}: there {stored.get(key)!r}, asked for {requested.get(key)!r}" for key in keys]
    if "rules" in keys:
        lines.append("  (another version of maskfleet built it by other rules; it can still be read)")
    return lines
