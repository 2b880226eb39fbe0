"""Reads XML dumps of Wikipedia and other MediaWiki sites: each article is a document.

MediaWiki writes `<page>` and `</page>` on lines of their own, and escapes every `<` in a text. So reading may start at
any byte, pages are found by their lines, and the XML parser gets single pages, which cannot declare entities. Pages
outside the namespace of articles, such as talk and templates, and redirects are not documents; they are counted.

Fields: `id` (`enwiki:12`), `title`, `url`, `date` (of the revision) and `language`. The format is MediaWiki's schema
export-0.11.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import quote
from xml.parsers import expat

from data_service.errors import InputError
from data_service.ingest.files import is_uncompressed_utf8, open_stored_bytes, open_text
from data_service.ingest.formats import InputLine, read_lines, read_piece_lines
from data_service.ingest.inputs import InputFile, require_packages
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import (
    BadRecord,
    TextRecord,
    decode_text,
    non_document_record,
    parse_document,
    skip_or_refuse,
    too_long_record,
    try_read,
)
from data_service.ingest.tasks import FilePiece
from data_service.ingest.wikitext import wikitext_to_plain_text

DUMP_END = b"</mediawiki>"  # last line of a dump
_PAGE_START, PAGE_END = b"<page>", b"</page>"
_HEADER_BYTES = 1 << 20  # bytes at the start of a dump in which its properties are looked for
_TAIL_BYTES = 256  # bytes at the end of a dump in which its end tag is looked for
# Namespaces of pictures and categories, by number. These English names are valid in every wiki.
_HIDDEN_NAMESPACES = {"6": ("file", "image"), "14": ("category",)}
_HIDDEN_NAMESPACE_TAG = re.compile(r'<namespace key="(6|14)"[^>]*>([^<]*)</namespace>')
_REFETCH_REMEDY = "fetch the dump again; no document of it was used"
_WANTED_ELEMENTS = {  # paths of the XML elements whose text is read
    "page/title",
    "page/ns",
    "page/id",
    "page/revision/timestamp",
    "page/revision/model",
    "page/revision/text",
}


@dataclass(frozen=True)
class WikiInfo:
    """Properties of a wiki that its dump states.

    Attributes:
        name: its database, such as `enwiki`; "" if the dump does not say.
        base: URL before the title of an article; "" if the dump does not say.
        language: code of its language; None if the dump does not say.
        hidden: names in lower case of the namespaces of pictures and of categories.
    """

    name: str
    base: str
    language: str | None
    hidden: frozenset[str]


def read_dump(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the pages that begin in a piece of a dump; those that are not articles have no text.

    Raises:
        InputError: the file is not a dump, it is cut short, or the package that reads wikitext is missing.
    """
    require_packages(piece.file)
    wiki, limit = read_wiki_info(piece.file), options.max_document_bytes
    for offset, data in _split_pages(read_piece_lines(piece, limit), piece, limit):
        place = RecordPlace(piece.file, "byte", offset)
        if len(data) > limit:
            yield skip_or_refuse(options, too_long_record(place, limit))
        else:
            yield try_read(options, _document_from_page, data, wiki, options, place)


@lru_cache(maxsize=64)
def read_wiki_info(file: InputFile) -> WikiInfo:
    """Return the properties in the first lines of a dump. The last line of an uncompressed dump is checked, too.

    Raises:
        InputError: the file is not a dump, or cut short.
    """
    head = _read_head(file)
    if "<mediawiki" not in head:
        raise InputError(
            f"{file.uri} is not a dump of a MediaWiki: it does not begin with <mediawiki>",
            remedy="give a dump such as ...-pages-articles.xml.bz2; files of other formats need their own suffix",
        )
    if is_uncompressed_utf8(file):
        with open_stored_bytes(file, start=max(0, file.size - _TAIL_BYTES), chunk_bytes=_TAIL_BYTES) as stream:
            check_dump_end(file, stream.read())
    base = _text_between(head, "<base>", "</base>")
    names = {name for known in _HIDDEN_NAMESPACES.values() for name in known}
    names |= {html.unescape(name).lower() for _, name in _HIDDEN_NAMESPACE_TAG.findall(head)}
    language = re.search(r'xml:lang="([^"]+)"', head)
    return WikiInfo(
        _text_between(head, "<dbname>", "</dbname>"),
        base[: base.rfind("/") + 1],
        language[1] if language else None,
        frozenset(names),
    )


def check_dump_end(file: InputFile, tail: bytes) -> None:
    """Raise InputError if the last bytes of a dump, `tail`, lack its end tag."""
    if not tail.rstrip().endswith(DUMP_END):
        raise InputError(
            f"{file.uri}: the dump is cut short: it does not end with </mediawiki>", remedy=_REFETCH_REMEDY
        )


def _read_head(file: InputFile) -> str:
    """Return the lines before the first page of a dump, in the first `_HEADER_BYTES` bytes."""
    lines: list[bytes] = []
    with open_text(file) as stream:
        for line in read_lines(stream, 0, _HEADER_BYTES):
            if line.offset > _HEADER_BYTES or line.data.lstrip().startswith(_PAGE_START):
                break
            lines.append(line.data)
    return b"".join(lines).decode(errors="replace")


def _text_between(text: str, begin: str, end: str) -> str:
    found = text.partition(begin)[2].partition(end)
    return html.unescape(found[0]).strip() if found[1] else ""


def _split_pages(lines: Iterator[InputLine], piece: FilePiece, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of each page that begins in the piece; longer pages are truncated soon after `limit` bytes.

    Raises:
        InputError: a page does not end, or the last line is missing.
    """
    page: list[bytes] | None = None
    first = size = 0
    closed = bool(piece.plain_size) or piece.file.compression == ""
    for line in lines:
        if page is None and not piece.contains_document_at(line.offset):
            return
        words = line.data.strip()
        if words.startswith(_PAGE_START):
            if page is not None and size <= limit:
                raise _truncated_error(piece.file, first)
            if page is not None:
                yield first, b"".join(page)
                if not piece.contains_document_at(line.offset):
                    return
            page, first, size = [], line.offset, 0
        if page is None:
            closed = closed or words == DUMP_END
            continue
        if size <= limit:
            page.append(line.data)
        size += len(line.data)
        if words.endswith(PAGE_END):
            yield first, b"".join(page)
            page = None
    if page is not None and size > limit:
        yield first, b"".join(page)
    if (page is not None and size <= limit) or not closed:
        raise _truncated_error(piece.file, first)


def _truncated_error(file: InputFile, offset: int) -> InputError:
    return InputError(
        f"{file.uri}: damaged or cut short: the text from the page at byte {offset:,} on is incomplete",
        remedy=_REFETCH_REMEDY,
    )


def _document_from_page(data: bytes, wiki: WikiInfo, options: BuildOptions, place: RecordPlace) -> TextRecord:
    raw = decode_text(data, options, place, place.number)
    found = _parse_page_elements(raw.text, place)
    number, title = found.get("page/id", ""), found.get("page/title", "")
    values: dict[str, object] = {
        "id": f"{wiki.name}:{number}" if wiki.name else number,
        "title": title,
        "url": wiki.base + quote(title.replace(" ", "_"), safe="/:@!$&'()*,;~") if wiki.base else None,
        "date": found.get("page/revision/timestamp"),
        "language": wiki.language,
    }
    if (reason := _non_article_reason(found)) is not None:
        return non_document_record(reason, values, options, place)
    try:
        text = wikitext_to_plain_text(found.get("page/revision/text", ""), wiki.hidden)
    except ValueError as error:
        raise BadRecord(place, str(error), "leave the page out of the dump") from error
    made = parse_document({**values, options.text_field: text}, options, place)
    return replace(made, replaced=made.replaced or raw.replaced)


def _non_article_reason(elements: dict[str, str]) -> str | None:
    """Return why a page is not an article; None if it is an article."""
    if elements.get("page/ns", "0").strip() != "0":
        return "other_namespace"
    if "page/redirect" in elements:
        return "redirect"
    return "no_wikitext" if elements.get("page/revision/model", "wikitext") != "wikitext" else None


def _parse_page_elements(page: str, place: RecordPlace) -> dict[str, str]:
    """Return the texts of the wanted elements of a page, by path. With several revisions, the last one counts.

    Raises:
        BadRecord: the page is not XML, or has no id.
    """
    path: list[str] = []
    found: dict[str, list[str]] = {}

    def start_element(name: str, _: dict[str, str]) -> None:
        path.append(name)
        here = "/".join(path)
        if here in _WANTED_ELEMENTS or here == "page/redirect":
            found[here] = []

    def character_data(data: str) -> None:
        if (here := "/".join(path)) in _WANTED_ELEMENTS:
            found[here].append(data)

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.CharacterDataHandler = start_element, character_data
    parser.EndElementHandler = lambda _: path.pop()
    try:
        parser.Parse(page, True)
    except expat.ExpatError as error:
        raise BadRecord(place, f"the page is not XML: {error}", "fetch the dump again") from error
    joined = {name: "".join(parts) for name, parts in found.items()}
    if not joined.get("page/id"):
        raise BadRecord(place, "the page has no <id>", "fetch the dump again")
    return joined
