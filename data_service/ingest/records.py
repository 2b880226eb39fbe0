"""Turns a record of the input into a document, an example of a corpus of pairs, or a bad record.

Bytes must be UTF-8; otherwise an error names the first bad byte. The options say whether bad records are refused, or
counted and skipped (`places.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec

from data_service.corpus.provenance import MISSING_FIELD_REMEDY, DuplicateCluster, Provenance
from data_service.corpus.words import mark_word_starts
from data_service.errors import InputError
from data_service.ingest.encodings import UTF_8, encoding_remedy, strip_bom
from data_service.ingest.files import open_decompressed
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import BuildOptions, PairFields
from data_service.ingest.places import RecordPlace, SkippedRecord

_REPLACE_REMEDY = "put U+FFFD in place of each bad byte with --on-bad-bytes replace"
_ENCODING_REMEDY = f"give its encoding with --encoding, or {_REPLACE_REMEDY}"
_CONTEXT_BYTES = 32 * 1024  # bytes on each side of a bad byte from which the encoding is guessed
_SKIP_REMEDY = "; or leave bad records out with --on-bad-records skip"
_P = ParamSpec("_P")

_FIELDS_REMEDY = "name the fields with --query-field, --positive-field and --negatives-field"
_WORDS_REMEDY = "list the words of every document in the order of its text, and name their field with --words-field"
_NESTED_REMEDY = "write texts as one list of strings; write words as one list, or as a list for each sentence"
_MISSING_VALUE = object()  # stands for a field that a record does not have
NOT_CHOSEN_REASON = "not_chosen"  # `TextRecord.absent` of a document whose licence or source was not chosen


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A document, or an example of a corpus of pairs, as it was read.

    Attributes:
        text: text of the document; query of the example.
        replaced: whether bytes that were not UTF-8 were replaced by U+FFFD.
        others: positive and negatives of the example; empty for a document.
        words: where the words of the input begin, as `mark_word_starts` returns it; empty if the input holds no words.
        provenance: where the document comes from, if the options ask for provenance.
        place: place of the record; None unless the options ask for other fields than the text.
        metadata: values of the options' `metadata_fields`, in this order; None for a field that the record lacks.
        cluster: cluster of near duplicates, if the input names it.
        absent: why a valid record is not a document, such as `redirect`; "" for a document.
    """

    text: str
    replaced: bool
    others: tuple[str, ...] = ()
    words: bytes = b""
    provenance: Provenance | None = None
    place: RecordPlace | None = None
    metadata: tuple[str | None, ...] = ()
    cluster: DuplicateCluster | None = None
    absent: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the record: one of a document, several of an example."""
        return (self.text, *self.others)

    @property
    def size(self) -> int:
        """Number of UTF-8 bytes of all texts."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def cluster_name(self) -> str | None:
        """The name of its cluster of near duplicates; None if it has none, or the input names no clusters."""
        return None if self.cluster is None else self.cluster.name

    @property
    def is_blank(self) -> bool:
        """Whether one of the texts is empty or white space. Such documents are counted, but not numbered."""
        return any(not text or text.isspace() for text in self.texts)


class BadRecord(Exception):
    """A record that cannot be used, in a file that can be read. `reason`: why; `remedy`: what the user can do."""

    def __init__(self, place: RecordPlace, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.place, self.reason, self.remedy = place, reason, remedy

    def to_input_error(self) -> InputError:
        """Return the error for the user, whose remedy also offers to skip bad records."""
        return InputError(f"{self.place}: {self.reason}", remedy=self.remedy + _SKIP_REMEDY)

    def to_skipped_record(self) -> SkippedRecord:
        """Return the entry that a receipt stores. This does not read the file to count lines."""
        place = self.place
        return SkippedRecord(uri=place.file.uri, unit=place.unit, number=place.number, reason=self.reason)


def skip_or_refuse(options: BuildOptions, bad: BadRecord) -> BadRecord:
    """Return `bad` if the options skip bad records. Raises InputError: the options refuse them."""
    if options.on_bad_records == "error":
        raise bad.to_input_error() from bad
    return bad


def try_read(
    options: BuildOptions, read: Callable[_P, TextRecord], *args: _P.args, **kwargs: _P.kwargs
) -> TextRecord | BadRecord:
    """Return what `read(*args, **kwargs)` returns for a record, or the BadRecord that it raises if these are skipped.

    Raises:
        InputError: the record is bad, and the options refuse bad records.
    """
    try:
        return read(*args, **kwargs)
    except BadRecord as bad:
        return skip_or_refuse(options, bad)


def decode_text(raw: bytes, options: BuildOptions, place: RecordPlace, first_byte: int | None = None) -> TextRecord:
    """Return the text of `raw`. `first_byte`: its offset in the (decompressed) file; None for a value of a table.

    Raises:
        BadRecord: the bytes are not UTF-8, unless the options replace bad bytes.
    """
    try:
        return TextRecord(raw.decode(), False)
    except UnicodeDecodeError as error:
        if options.on_bad_bytes == "replace":
            return TextRecord(raw.decode(errors="replace"), True)
        raise _bad_bytes_record(raw, error, options, place, first_byte) from error


def _bad_bytes_record(
    raw: bytes, error: UnicodeDecodeError, options: BuildOptions, place: RecordPlace, first_byte: int | None
) -> BadRecord:
    """Return the bad record for bytes that are not UTF-8.

    Guessing an encoding takes long, so it is not guessed for records that are skipped.
    """
    file = place.file
    of = " of the text" if first_byte is None else " of the decompressed text" if file.compression else ""
    byte = (first_byte or 0) + error.start
    if file.encoding != UTF_8:
        reason = f"byte {byte} of the text, converted to UTF-8, comes from bytes that are not {file.encoding}"
        remedy = f"give the right encoding with --encoding, or {_REPLACE_REMEDY}"
    else:
        reason = f"byte {byte}{of} is not UTF-8 (0x{raw[error.start]:02x}: {error.reason})"
        remedy = _ENCODING_REMEDY
    if file.format in ("parquet", "arrow"):
        remedy = f"name a column of UTF-8 text with --text-field, or {_REPLACE_REMEDY}"
    elif options.on_bad_records == "error":
        remedy = guess_encoding_remedy(file, raw[max(0, error.start - _CONTEXT_BYTES) :][: 2 * _CONTEXT_BYTES], remedy)
    return BadRecord(place, reason, remedy)


def guess_encoding_remedy(file: InputFile, raw: bytes, remedy: str, option_template: str = "give --encoding {}") -> str:
    """Return a remedy for bytes that cannot be read: the encoding that `raw` or the file's first bytes seem to have,
    else `remedy`.

    `option_template`: how the user declares an encoding, with `{}` for its name.
    """
    head = raw
    if not file.inside:
        with open_decompressed(file) as stream:
            head = stream.read(_CONTEXT_BYTES)
    marked = strip_bom(head, 0)[0]
    whole = file.encoding != UTF_8 or not marked.isascii() or b"\0" in head
    found = encoding_remedy(head if whole else raw, option_template)
    return f"{found}; else {remedy}" if found else remedy


def _decode_or_check(value: str | bytes, options: BuildOptions, place: RecordPlace) -> TextRecord:
    """Return the text of a record's value. Raises the errors of `decode_text` and `check_text`."""
    if isinstance(value, str):
        return check_text(value, options, place)
    raw = decode_text(value, options, place)
    return replace(check_text(raw.text, options, place), replaced=raw.replaced)


def check_text(text: str, options: BuildOptions, place: RecordPlace) -> TextRecord:
    r"""Return the text of a string that was read, checked.

    JSON can spell half a surrogate pair ("\ud800"), which is not a character and cannot be written as UTF-8.

    Raises:
        BadRecord: the text holds such a half pair, unless the options replace it; or the document is too long.
    """
    replaced = False
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        if options.on_bad_bytes == "error":
            reason = f"character {error.start} is half a surrogate pair, which is not text"
            raise BadRecord(place, reason, _ENCODING_REMEDY) from error
        text, replaced = text.encode(errors="surrogatepass").decode(errors="replace"), True
        size = len(text.encode())
    if size > options.max_document_bytes:
        raise too_long_record(place, options.max_document_bytes)
    return TextRecord(text, replaced)


def too_long_record(place: RecordPlace, limit: int) -> BadRecord:
    """Return the bad record for a document at `place` that is longer than `limit` bytes."""
    return BadRecord(
        place,
        f"a document of more than {limit:,} bytes, which is too long",
        "cut it into documents (.txt with blank lines between them: --txt-documents blank_line), or "
        "raise --max-document-bytes",
    )


def flatten_named_fields(record: dict[str, object], options: BuildOptions) -> dict[str, object]:
    """Return the record, with each nested field that the options name, such as `meta.text`, also at the top level."""
    found = dict(record)
    for name in (*options.required_fields, *options.optional_fields):
        value: object = record
        for part in () if name in record else name.split("."):
            value = value.get(part, _MISSING_VALUE) if isinstance(value, dict) else _MISSING_VALUE
        if value is not record and value is not _MISSING_VALUE:
            found[name] = value
    return found


def parse_document(record: Mapping[str, object], options: BuildOptions, place: RecordPlace) -> TextRecord:
    """Return the document of a record, with its words if the options name a field of words.

    Raises:
        BadRecord: the field is neither text nor a number, not UTF-8 or too long, or the words do not fit the text.
    """
    value = record[options.text_field]
    if isinstance(value, bool) or not isinstance(value, bytes | str | int | float):
        reason = f"field {options.text_field!r} is {type(value).__name__}, not text"
        raise BadRecord(place, reason, "name a field of texts with --text-field, or remove the record")
    found = _decode_or_check(value if isinstance(value, bytes) else str(value), options, place)
    for name in options.word_fields:
        words = list(_parse_words(record.get(name), name, options, place))
        try:
            found = replace(found, words=mark_word_starts(found.text, words))
        except ValueError as error:
            raise BadRecord(
                place, f"field {name!r} does not hold the words of the text: {error}", _WORDS_REMEDY
            ) from error
    return with_provenance(_add_metadata(found, record, options, place), record, options, place)


def non_document_record(
    reason: str, record: Mapping[str, object], options: BuildOptions, place: RecordPlace
) -> TextRecord:
    """Return an empty text that stands for a record that is not a document, with the reason.

    Raises:
        BadRecord: a field besides the text is not text.
    """
    return _add_metadata(TextRecord("", False, absent=reason), record, options, place)


def _add_metadata(
    found: TextRecord, record: Mapping[str, object], options: BuildOptions, place: RecordPlace
) -> TextRecord:
    if options.metadata_fields is None:
        return found
    values = (_metadata_text(record.get(name), name, place) for name in options.metadata_fields)
    return replace(found, place=place, metadata=tuple(values))


def with_provenance(
    text: TextRecord, record: Mapping[str, object], options: BuildOptions, place: RecordPlace
) -> TextRecord:
    """Return the text with its record's provenance, if the options ask for provenance and the text is not blank. A text
    whose licence or source is not chosen is replaced by an empty one.

    Raises:
        BadRecord: the record lacks a field of the provenance.
    """
    if options.provenance is None or text.is_blank:
        return text
    try:
        known = options.provenance.read_provenance(record, place.file.uri)
    except ValueError as error:
        raise BadRecord(place, str(error), MISSING_FIELD_REMEDY) from error
    if not options.provenance.is_selected(known):
        return TextRecord("", False, absent=NOT_CHOSEN_REASON)
    return replace(text, provenance=known, place=place)


def _metadata_text(value: object, name: str, place: RecordPlace) -> str | None:
    """Return the value of a metadata field as a string; None for an empty value."""
    match value:
        case bytes():
            found = value.decode(errors="replace")
        case None | str() | bool() | int() | float():
            found = "" if value is None else str(value)
        case _:
            reason = f"field {name!r} holds {type(value).__name__}, not a text or a number"
            raise BadRecord(place, reason, "name a field with one value under `fields`, or correct the record")
    return found.encode(errors="replace").decode().strip() or None


def _parse_words(value: object, name: str, options: BuildOptions, place: RecordPlace) -> Iterator[str]:
    """Yield the words in a field's value: a list of words, a list of sentences (lists of words), or text with spaces
    between words."""
    match value:
        case list():
            for item in value:
                yield from (text.text for text in _parse_texts(item, name, options, place))
        case str() | bytes():
            yield from (word for text in _parse_texts(value, name, options, place) for word in text.text.split())
        case _:
            kind = "nothing" if value is None else type(value).__name__
            raise BadRecord(place, f"field {name!r} holds {kind}, but words are needed", _WORDS_REMEDY)


def parse_record(record: Mapping[str, object], options: BuildOptions, place: RecordPlace) -> TextRecord:
    """Return the example of a record if the options ask for pairs, else its document. Raises BadRecord."""
    return (
        parse_document(record, options, place)
        if options.pairs is None
        else _parse_example(record, options.pairs, options, place)
    )


def _parse_example(
    record: Mapping[str, object], pairs: PairFields, options: BuildOptions, place: RecordPlace
) -> TextRecord:
    """Return the example of a record: its query, positive and first `pairs.count` negatives.

    Values are text, bytes, lists of these, or None if a field is missing. Negatives come from all fields
    `pairs.negatives`, in order; blank ones do not count.

    Raises:
        BadRecord: there is not exactly one query and one positive, there are too few negatives, a value is not text, or
            the texts are too long.
    """
    query, positive = (_single_text(record, name, options, place) for name in (pairs.query, pairs.positive))
    names = pairs.negatives if pairs.count else ()
    negatives = [
        text for name in names for text in _parse_texts(record.get(name), name, options, place) if not text.is_blank
    ]
    if len(negatives) < pairs.count:
        raise BadRecord(
            place,
            f"{len(negatives)} negatives in {' and '.join(map(repr, names))}, but each example needs {pairs.count}",
            f"ask for fewer with --negatives, give more, or {_FIELDS_REMEDY}",
        )
    found = (query, positive, *negatives[: pairs.count])
    made = replace(query, others=tuple(text.text for text in found[1:]), replaced=any(text.replaced for text in found))
    if made.size > options.max_document_bytes:
        raise BadRecord(
            place,
            f"an example of more than {options.max_document_bytes:,} bytes",
            "shorten its texts, whose ends training truncates anyway, or raise --max-document-bytes",
        )
    return with_provenance(made, record, options, place)


def _single_text(record: Mapping[str, object], name: str, options: BuildOptions, place: RecordPlace) -> TextRecord:
    """Return the text in field `name`. Raises BadRecord: the field does not hold exactly one text."""
    if record.get(name) is None:
        there = "it is null" if name in record else f"it has {', '.join(map(repr, record))}"
        raise BadRecord(place, f"no field {name!r} ({there})", _FIELDS_REMEDY)
    found = list(_parse_texts(record[name], name, options, place))
    if len(found) != 1:
        raise BadRecord(
            place,
            f"field {name!r} holds {len(found)} texts, but an example needs exactly one",
            "write a separate record for each text",
        )
    return found[0]


def _parse_texts(value: object, name: str, options: BuildOptions, place: RecordPlace) -> Iterator[TextRecord]:
    """Yield the texts in a field's value, which is one text, a list of texts, or None for no texts."""
    match value:
        case None:
            return
        case str() | bytes():
            yield _decode_or_check(value, options, place)
        case list():
            for item in value:
                if isinstance(item, list):
                    raise BadRecord(place, f"field {name!r} holds a list of lists, not of texts", _NESTED_REMEDY)
                yield from _parse_texts(item, name, options, place)
        case _:
            raise BadRecord(place, f"field {name!r} holds {type(value).__name__}, not text", _FIELDS_REMEDY)
