"""Bytes to text: UTF-8 or a clear error. Records that cannot be used are refused or handed on as bad, as asked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import BuildOptions

_REMEDY = "convert the file to UTF-8, or build with --on-bad-bytes replace (each bad byte becomes U+FFFD)"
_SKIP_REMEDY = "; or leave bad records out with --on-bad-records skip"
_BOM = b"\xef\xbb\xbf"
_P = ParamSpec("_P")

Unit = Literal["", "byte", "line", "row"]


@dataclass(frozen=True, slots=True)
class Text:
    """A document as read; `replaced` if some of it was not UTF-8 and U+FFFD stands for it.

    In a corpus of pairs, an example: `text` is its query, `others` are its positive and its negatives.
    """

    text: str
    replaced: bool
    others: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its texts, the one of a document."""
        return (self.text, *self.others)

    @property
    def size(self) -> int:
        """UTF-8 bytes of all of them."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def blank(self) -> bool:
        """Whether there is nothing in it, or in one of its texts: such documents are counted, not numbered."""
        return any(not text or text.isspace() for text in self.texts)


class Place(Protocol):
    """Where a record is. As a string it names file and line or row, which may take a look at the file.

    `number` counts what `unit` says: lines from 1, rows from 0, bytes from 0 to where a line begins. A whole file has
    no unit.
    """

    @property
    def file(self) -> InputFile: ...

    @property
    def unit(self) -> Unit: ...

    @property
    def number(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line or a row of a file, or the file as a whole."""

    file: InputFile
    unit: Unit = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.file.uri}, {self.unit} {self.number}" if self.unit else self.file.uri


class BadRecord(Exception):
    """A record that cannot be used, in a file that can: `reason` says why, `remedy` what to do about it."""

    def __init__(self, place: Place, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.place, self.reason, self.remedy = place, reason, remedy

    def error(self) -> InputError:
        """The same as an error for the user, who may have a policy."""
        return InputError(f"{self.place}: {self.reason}", remedy=self.remedy + _SKIP_REMEDY)


def accept(
    options: BuildOptions, read: Callable[_P, Text], *args: _P.args, **kwargs: _P.kwargs
) -> Text | BadRecord:
    """What `read` makes of a record, or what is wrong with it, if bad records are to be skipped.

    Raises:
        InputError: the record is bad, and bad records are to be refused.
    """
    try:
        return read(*args, **kwargs)
    except BadRecord as bad:
        if options.on_bad_records == "error":
            raise bad.error() from bad
        return bad


def without_mark(raw: bytes, offset: int) -> tuple[bytes, int]:
    """`raw`, which begins at byte `offset` of a file, and its offset, without a byte order mark."""
    if offset == 0 and raw.startswith(_BOM):
        return raw[len(_BOM) :], len(_BOM)
    return raw, offset


def decode(raw: bytes, options: BuildOptions, place: Place, base: int | None = None) -> Text:
    """The text of `raw`, which begins at byte `base` of the (decompressed) file, or is a value of a table.

    Raises:
        BadRecord: bytes that are not UTF-8, unless the options say to replace them.
    """
    try:
        return Text(raw.decode(), False)
    except UnicodeDecodeError as error:
        if options.on_bad_bytes == "replace":
            return Text(raw.decode(errors="replace"), True)
        of = " of the text" if base is None else " of the decompressed text" if place.file.compression else ""
        reason = (
            f"byte {(base or 0) + error.start}{of} is not UTF-8 (0x{raw[error.start]:02x}: {error.reason})"
        )
        raise BadRecord(place, reason, _REMEDY) from error


def checked(text: str, options: BuildOptions, place: Place) -> Text:
    r"""Text that was a string already, if it is one that can be kept.

    JSON can spell half a surrogate pair ("\ud800"), which is no character and cannot be written as UTF-8.

    Raises:
        BadRecord: such text, unless the options say to replace it, or a document that is too long.
    """
    replaced = False
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        if options.on_bad_bytes == "error":
            reason = f"character {error.start} is half a surrogate pair, which is not text"
            raise BadRecord(place, reason, _REMEDY) from error
        text, replaced = text.encode(errors="surrogatepass").decode(errors="replace"), True
        size = len(text.encode())
    if size > options.max_document_bytes:
        raise too_long(place, options.max_document_bytes)
    return Text(text, replaced)


def too_long(place: Place, limit: int) -> BadRecord:
    """What is wrong with a document at `place` that is longer than `limit` bytes."""
    return BadRecord(
        place,
        f"a document of more than {limit:,} bytes, longer than a block may be",
        "cut it into documents (.txt with blank lines between them: --txt-documents blank_line), or "
        "raise --max-document-bytes",
    )
