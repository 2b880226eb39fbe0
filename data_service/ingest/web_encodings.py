"""Decodes web pages as browsers do: the codings in which HTTP sends their bytes, and the charsets of their text.

Names of charsets follow https://encoding.spec.whatwg.org, where `iso-8859-1` means windows-1252. Python knows most.
"""

import codecs
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress

from data_service.ingest.encodings import UTF_8, is_garbled, python_encoding_name

# HTTP's content codings and Arrow's names of them.
_CODEC_BY_CODING = dict.fromkeys(("gzip", "x-gzip", "deflate"), "gzip") | {"br": "brotli", "zstd": "zstd"}
_BOMS = ((codecs.BOM_UTF8, UTF_8), (codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF16_LE, "utf-16-le"))
_BYTES_BEFORE_MARKUP = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n\f"  # bytes that may precede the first tag
# Bytes at the start of a page that are searched for its charset. The HTML standard demands 1,024.
_CHARSET_SEARCH_BYTES = 16 * 1024
_CHARSET_DECLARATION = re.compile(rb"<!--.*?(?:-->|$)|<(?:meta\b|\?xml\b)[^>]*", re.DOTALL | re.IGNORECASE)
_CHARSET = re.compile(rb"""\b(?:charset|encoding)\s*=\s*["']?\s*([^\s"';,/>]+)""", re.IGNORECASE)
_CONTENT_ATTRIBUTE = re.compile(rb"\bcontent\s*=", re.IGNORECASE)
_HTTP_EQUIV = re.compile(rb"""\bhttp-equiv\s*=\s*["']?\s*content-type""", re.IGNORECASE)
_NON_TEXT_CODEC = "no-text"  # stands for a charset that is not an encoding of text
_BROWSER_ERROR_HANDLER = "maskfleet.as_browsers"
_ISO_8859 = re.compile(r"(?:cs)?iso8859(\d+?)(?:19\d\d)?[ei]?")  # the group is the part number
# The codec that browsers use, by the codec that the page names.
_BROWSER_CODECS = {
    **{"iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"},
    **{"gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932", "euc_kr": "cp949"},
    **{"utf-16": "utf-16-le"},
}
# Names of charsets, without punctuation, that Python does not know. Each line is a codec and its names.
_CODEC_BY_LABEL = {
    label: codec
    for codec, *labels in map(
        str.split,
        """utf-8 unicode11utf8 unicode20utf8
        cp1252 ascii usascii ansix341968
        cp874 dos874 windows874
        iso8859-7 suneugreek
        iso8859-8 visual logical
        iso8859-15 csisolatin9
        koi8-r koi koi8
        koi8-u koi8ru
        mac-roman mac csmacintosh
        mac-cyrillic macukrainian
        gb18030 gb2312 gb231280 csgb2312
        euc_jp cseucpkdfmtjapanese
        cp932 windows31j
        cp949 cseuckr csksc56011987 ksc56011989 ksc5601 isoir149 windows949
        utf-16-be unicodefffe
        utf-16-le csunicode iso10646ucs2 ucs2 unicode unicodefeff
        no-text replacement iso2022cn iso2022cnext userdefined""".splitlines(),
    )
    for label in labels
}


def decode_content(data: bytes, codings: Sequence[str], max_bytes: int) -> bytes:
    """Return at most `max_bytes` + 1 bytes of a page that was sent in `codings`, in the order in which they were
    applied.

    If decoding fails but the page begins like HTML, because it was stored decoded, it is returned as it is.

    Raises:
        ValueError: a coding is unknown, or the page is damaged.
    """
    for coding in reversed(codings):
        try:
            data = _decompress(data, coding, max_bytes + 1) if data else data
        except (OSError, EOFError, zlib.error, KeyError) as error:
            if not data.lstrip(_BYTES_BEFORE_MARKUP).startswith(b"<"):
                raise ValueError(f"content coding {coding!r} is unknown, or its data is damaged: {error}") from error
    return data


def _decompress(data: bytes, coding: str, max_bytes: int) -> bytes:
    if coding == "deflate" and (data[0] & 15 != zlib.DEFLATED or int.from_bytes(data[:2]) % 31):
        # Some servers send bare deflate data, without the zlib header that HTTP demands.
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        found = inflate.decompress(data, max_bytes)
        if not inflate.eof and len(found) < max_bytes:
            raise EOFError("it ends too early")
        return found
    import pyarrow as pa

    return bytes(pa.CompressedInputStream(io.BytesIO(data), _CODEC_BY_CODING[coding]).read(max_bytes))


def decode_html_page(page: bytes, content_type: str) -> str | None:
    """Return the text of an HTML page by its byte order mark, else by the charset of its `Content-Type`, else by its
    own `<meta>`; None if none of them says how to read it, so that it must be guessed.

    A charset that garbles the text (`is_garbled`) is not used.

    Raises:
        ValueError: the page names a charset that is not an encoding of text.
    """
    for mark, codec in _BOMS:
        if page.startswith(mark):
            return page[len(mark) :].decode(codec, errors=_BROWSER_ERROR_HANDLER)
    for label in _declared_charsets(page, content_type):
        named = _codec_for_label(label)
        if named == _NON_TEXT_CODEC:
            raise ValueError(f"charset {label!r} is not an encoding of text")
        if named is not None and not is_garbled(text := _decode_by_codec(page, named)):
            return text
    return None


def _declared_charsets(page: bytes, content_type: str) -> Iterator[str]:
    """Yield the charset in the page's `Content-Type`, and the first one that the page itself declares."""
    if found := _CHARSET.search(content_type.encode(errors="replace")):
        yield found[1].decode(errors="replace")
    for tag in _CHARSET_DECLARATION.findall(page[:_CHARSET_SEARCH_BYTES]):
        found = None if tag.startswith(b"<!") else _CHARSET.search(tag)
        if not found or (_CONTENT_ATTRIBUTE.search(tag) and not _HTTP_EQUIV.search(tag)):
            continue
        label = found[1].decode(errors="replace").lower()
        # The HTML standard demands both replacements: a page is not UTF-16 if its declaration could be read as ASCII.
        yield UTF_8 if label.startswith("utf-16") else label.replace("x-user-defined", "windows-1252")
        return


def _codec_for_label(label: str) -> str | None:
    """Return Python's name of a charset; None if the label is unknown, `_NON_TEXT_CODEC` if it is not one of text."""
    label = re.sub(r"^(x-|cn-)+", "", label.strip().lower())
    plain = re.sub(r"[^a-z0-9]", "", label)
    if plain in _CODEC_BY_LABEL:
        return _CODEC_BY_LABEL[plain]
    try:
        name = python_encoding_name(_ISO_8859.sub(r"iso8859-\1", plain) if _ISO_8859.fullmatch(plain) else label)
    except ValueError:
        return None
    return _BROWSER_CODECS.get(name, name)


def _decode_by_codec(page: bytes, codec: str) -> str:
    # Many servers declare cp1252 for pages in UTF-8, and text in cp1252 is hardly ever valid UTF-8.
    if codec == "cp1252":
        with suppress(UnicodeDecodeError):
            return page.decode()
    return page.decode(codec, errors=_BROWSER_ERROR_HANDLER)


def _decode_as_browsers(error: UnicodeError) -> tuple[str, int]:
    """Return the character that browsers decode where Python's codec fails: a NEC or IBM extension of the Japanese
    charsets, or gb18030's euro sign; else U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    if error.encoding == "gb18030" and error.object[error.start] == 0x80:
        return "\u20ac", error.start + 1
    pair = [byte & 127 for byte in error.object[error.start : error.start + 2]]
    if error.encoding in ("euc_jp", "iso2022_jp") and len(pair) == 2 and 32 < min(pair) <= max(pair) < 127:
        row, cell = pair[0] - 33, pair[1] - 33 + 94 * (pair[0] - 33 & 1)  # from JIS to Shift JIS
        shifted = bytes([row // 2 + (0x81 if row < 62 else 0xC1), cell + 0x40 + (cell > 62)])
        with suppress(UnicodeDecodeError):
            return shifted.decode("cp932"), error.start + 2
    return "\ufffd", error.end


codecs.register_error(_BROWSER_ERROR_HANDLER, _decode_as_browsers)
