"""Encodings of text other than UTF-8: their names, byte order marks, conversion to UTF-8, and guesses.

All readers of documents work on UTF-8. A file in another encoding is converted while it is read, as a compressed file
is decompressed. Its stored bytes cannot be cut at characters, so it is always read from its beginning.
"""

import codecs
import io
import re
from typing import BinaryIO

UTF_8 = "utf-8"
# Longer marks first: that of UTF-32 begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, UTF_8),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
MAX_BOM_BYTES = 4  # length of the longest byte order mark, that of UTF-32
_NON_TEXT_CODECS = {  # Python's text codecs that are not used for text files
    "idna",
    "punycode",
    "undefined",
    "unicode_escape",
    "raw_unicode_escape",
    "utf-7",
    "mbcs",
    "oem",
}
_READ_CHUNK_BYTES = 1 << 20
# Each invalid sequence of bytes is decoded to one `_BAD_BYTE_MARK`, which marks its record as bad.
_BAD_BYTE_HANDLER = "maskfleet.bad_byte"
_BAD_BYTE_MARK = "\udcff"  # the surrogate to which `surrogateescape` decodes 0xff

_ENCODING_GUESS_BYTES = 64 * 1024  # bytes from which an encoding is guessed
_EXCERPT_CHARACTERS = 30  # characters of the text that a remedy shows
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\v\f\r") | {127})
_C1_CONTROLS = re.compile(b"\xc2[\x80-\x9f]")  # U+0080 to U+009F in UTF-8
_MAX_ODD_CHARACTER_SHARE = 0.01  # largest share of control characters and U+FFFD in normal text
_MIN_BYTES_PER_TOKEN = 1.2  # with fewer, the encoding or the tokenizer is wrong


def python_encoding_name(name: str) -> str:
    """Return Python's name of an encoding of text. It is "utf-8" also for UTF-8 with a byte order mark.

    Raises:
        ValueError: there is no such encoding, or it is not an encoding of text.
    """
    try:
        info = codecs.lookup(name)
        "".encode(name)
    except (LookupError, UnicodeError) as error:
        raise ValueError(f"{name!r} is not an encoding of text that Python knows") from error
    if info.name in _NON_TEXT_CODECS or info.name.replace("-", "_") in _NON_TEXT_CODECS:
        raise ValueError(f"{name!r} is not an encoding of text files")
    return UTF_8 if info.name in ("utf-8", "utf-8-sig", "ascii") else info.name


def encoding_from_bom(head: bytes) -> str | None:
    """Return the encoding that a file's byte order mark names; None if it has no mark. `head`: its first bytes."""
    return next((name for mark, name in _BYTE_ORDER_MARKS if head.startswith(mark)), None)


def strip_bom(raw: bytes, offset: int) -> tuple[bytes, int]:
    """Return `raw`, which begins at byte `offset` of a file, without a byte order mark of UTF-8, and its new offset."""
    if offset == 0 and raw.startswith(codecs.BOM_UTF8):
        return raw[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
    return raw, offset


class ReadableStream(io.RawIOBase):
    """A readable binary stream; subclasses define `readinto` or `read_some`."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        data = self.read_some(len(view))
        view[: len(data)] = data
        return len(data)

    def read_some(self, size: int) -> bytes | memoryview:
        """Return up to `size` bytes; no bytes at the end of the stream."""
        raise io.UnsupportedOperation("read_some")


class Utf8Stream(ReadableStream):
    """A stream of the text of `raw` in UTF-8. `head`: its first bytes, which were read already.

    A byte order mark at the beginning overrides the declared encoding.
    """

    def __init__(self, raw: BinaryIO, head: bytes, declared: str) -> None:
        encoding = encoding_from_bom(head) or declared
        self._raw, self._ready = raw, head
        self._decoder = None if encoding == UTF_8 else codecs.getincrementaldecoder(encoding)(errors=_BAD_BYTE_HANDLER)
        self._first = True
        if self._decoder is not None:
            self._ready = self._convert_to_utf8(head, self._decoder)

    def close(self) -> None:
        self._raw.close()
        super().close()

    def read_some(self, size: int) -> bytes:
        while not self._ready:
            if self._decoder is None:
                return self._raw.read(size)
            data = self._raw.read(_READ_CHUNK_BYTES)
            self._ready = self._convert_to_utf8(data, self._decoder)
            if not data and not self._ready:
                return b""
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def _convert_to_utf8(self, data: bytes, decoder: codecs.IncrementalDecoder) -> bytes:
        text = decoder.decode(data, final=not data)
        if self._first and text:
            self._first, text = False, text.removeprefix("\ufeff")
        return text.encode(errors="surrogateescape")


def _replace_bad_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _BAD_BYTE_MARK, error.end


codecs.register_error(_BAD_BYTE_HANDLER, _replace_bad_bytes)


def encoding_remedy(data: bytes, option_template: str) -> str | None:
    """Return the remedy for bytes that are not UTF-8 text, with a guess of their encoding; None without a guess.

    A guess may be wrong, so the remedy shows the text in that encoding. `option_template`: how the user declares an
    encoding, with `{}` for its name.
    """
    import charset_normalizer  # the import takes 0.1 s, and only errors need it

    # ASCII lines do not tell the encoding. A zero byte may mean UTF-16, which cannot be split at b"\n".
    if b"\0" not in data:
        data = b"\n".join(line for line in data.split(b"\n") if not line.isascii())
    data = data[:_ENCODING_GUESS_BYTES]
    best = charset_normalizer.from_bytes(data).best()
    if best is None or best.encoding in ("utf_8", "ascii"):
        return None
    # Windows' cp1252 has all printable characters of Latin-1, and also quotes and dashes.
    name = "cp1252" if "cp1252" in best.could_be_from_charset else best.encoding
    text = data.decode(name, errors="replace")
    beyond = next((i for i, character in enumerate(text) if character > "\x7f"), 0)
    begin = max(0, beyond - _EXCERPT_CHARACTERS // 2)
    shown = " ".join(text[begin : begin + _EXCERPT_CHARACTERS].split())
    return f"it looks like {name} and then reads {shown!r}: if that is right, {option_template.format(name)}"


def is_garbled(text: str) -> bool:
    """Return whether more than one character in a hundred is a control character or U+FFFD, as in a wrong encoding."""
    data = text.encode(errors="replace")
    odd = len(data) - len(data.translate(None, _CONTROL_BYTES))
    if len(data) != len(text):
        odd += text.count("\ufffd") + len(_C1_CONTROLS.findall(data))
    return odd > _MAX_ODD_CHARACTER_SHARE * len(text)


def odd_text_warning(odd_documents: int, documents: int, text_bytes: int = 0, tokens: int = 0) -> str | None:
    """Return a warning if text may have been read in the wrong encoding; None if not.

    Signs of that are `odd_documents`, the number of garbled documents (`is_garbled`), and nearly as many tokens as
    bytes, because a vocabulary that was trained on wrongly decoded text has a token for each of its bytes.
    """
    remedy = "another encoding may be right: --encoding"
    if odd_documents:
        return (
            f"warning: {odd_documents:,} of {documents:,} documents do not look like text: one character in a "
            "hundred or more is a "
            f"NUL, another control character or U+FFFD; {remedy}"
        )
    if tokens and text_bytes and text_bytes / tokens < _MIN_BYTES_PER_TOKEN:
        return (
            f"warning: {text_bytes / tokens:.2f} bytes of text a token, nearly every byte is a token of its own: the "
            f"tokenizer does not fit this text; or {remedy}"
        )
    return None
