"""Bytes to text: UTF-8 or a clear error."""

from dataclasses import dataclass

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import BuildOptions

_REMEDY = "convert the file to UTF-8, or build with --on-bad-bytes replace (each bad byte becomes U+FFFD)"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Text:
    """A document as read; `replaced` if some of it was not UTF-8 and U+FFFD stands for it."""

    text: str
    replaced: bool


def decode(raw: bytes, options: BuildOptions, file: InputFile, offset: int) -> Text:
    """The text of `raw`, which begins at byte `offset` of the (decompressed) file, without a byte order mark.

    Raises:
        InputError: bytes that are not UTF-8, unless the options say to replace them.
    """
    if offset == 0 and raw.startswith(_BOM):
        raw, offset = raw[len(_BOM) :], len(_BOM)
    try:
        return Text(raw.decode(), False)
    except UnicodeDecodeError as error:
        if options.on_bad_bytes == "replace":
            return Text(raw.decode(errors="replace"), True)
        place = f"byte {offset + error.start}" + (" of the decompressed text" if file.compression else "")
        problem = f"{file.uri}: {place} is not UTF-8 (0x{raw[error.start]:02x}: {error.reason})"
        raise InputError(problem, remedy=_REMEDY) from error


def checked(text: str, options: BuildOptions, place: object) -> Text:
    r"""Text that was a string already, if it is one that can be kept; `place` names it in messages.

    JSON can spell half a surrogate pair ("\ud800"), which is no character and cannot be written as UTF-8.

    Raises:
        InputError: such text, unless the options say to replace it, or a document that is too long.
    """
    replaced = False
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        if options.on_bad_bytes == "error":
            problem = f"{place}: character {error.start} is half a surrogate pair, which is not text"
            raise InputError(problem, remedy=_REMEDY) from error
        text, replaced = text.encode(errors="surrogatepass").decode(errors="replace"), True
        size = len(text.encode())
    if size > options.max_document_bytes:
        raise too_long(place, options.max_document_bytes)
    return Text(text, replaced)


def too_long(place: object, limit: int) -> InputError:
    """The error for a document at `place` that is longer than `limit` bytes."""
    return InputError(
        f"{place}: a document of more than {limit:,} bytes, longer than a block may be",
        remedy="cut it into documents (.txt with blank lines between them: --txt-documents blank_line), or "
        "raise --max-document-bytes",
    )
