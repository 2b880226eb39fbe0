"""Web archives: pages in every charset that browsers know and every content coding of HTTP, what their headers say, and
archives that are damaged."""

import codecs
import gzip
import io
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from data_service.errors import InputError
from data_service.ingest.records import BadRecord, TextRecord
from data_service.prepare.statistics import Statistics
from tests.support.data import preparations
from tests.support.data.text_files import records_of

pytest.importorskip("warcio", reason="needs maskfleet[prepare]")
pytest.importorskip("trafilatura", reason="needs maskfleet[prepare]")

# The table of https://encoding.spec.whatwg.org, by Python's codec for what browsers read. It has two more encodings:
# `replacement`, of which Python reads three labels, and `x-user-defined`.
LABELS = {
    "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8",
    "cp866": "866 cp866 csibm866 ibm866",
    "iso8859-2": "csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2",
    "iso8859-3": "csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3",
    "iso8859-4": "csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4",
    "iso8859-5": "csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 iso_8859-5:1988",
    "iso8859-6": (
        "arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6 iso-8859-6-e "
        "iso-8859-6-i iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987"
    ),
    "iso8859-7": (
        "csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 iso88597 iso_8859-7 "
        "iso_8859-7:1987 sun_eu_greek"
    ),
    "iso8859-8": (
        "csiso88598e csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e iso-ir-138 iso8859-8 iso88598 iso_8859-8 "
        "iso_8859-8:1988 visual csiso88598i iso-8859-8-i logical"
    ),
    "iso8859-10": "csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6",
    "iso8859-13": "iso-8859-13 iso8859-13 iso885913",
    "iso8859-14": "iso-8859-14 iso8859-14 iso885914",
    "iso8859-15": "csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9",
    "iso8859-16": "iso-8859-16",
    "koi8-r": "cskoi8r koi koi8 koi8-r koi8_r",
    "koi8-u": "koi8-ru koi8-u",
    "mac-roman": "csmacintosh mac macintosh x-mac-roman",
    "cp874": "dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874",
    "cp1250": "cp1250 windows-1250 x-cp1250",
    "cp1251": "cp1251 windows-1251 x-cp1251",
    "cp1252": (
        "ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 iso8859-1 iso88591 "
        "iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252 x-cp1252"
    ),
    "cp1253": "cp1253 windows-1253 x-cp1253",
    "cp1254": (
        "cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 iso_8859-9:1989 l5 latin5 "
        "windows-1254 x-cp1254"
    ),
    "cp1255": "cp1255 windows-1255 x-cp1255",
    "cp1256": "cp1256 windows-1256 x-cp1256",
    "cp1257": "cp1257 windows-1257 x-cp1257",
    "cp1258": "cp1258 windows-1258 x-cp1258",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "gb18030": "chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk gb18030",
    "big5hkscs": "big5 big5-hkscs cn-big5 csbig5 x-x-big5",
    "euc_jp": "cseucpkdfmtjapanese euc-jp x-euc-jp",
    "iso2022_jp": "csiso2022jp iso-2022-jp",
    "cp932": "csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis",
    "cp949": (
        "cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 windows-949"
    ),
    "utf-16-be": "unicodefffe utf-16be",
    "utf-16-le": "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16 utf-16le",
}
ALPHABETS = {
    **dict.fromkeys(("cp932", "euc_jp", "iso2022_jp"), "日本語の文章である漢字かなカナ"),
    **dict.fromkeys(("gb18030", "hz"), "这是中文句子的一些汉字"),
    **dict.fromkeys(("cp949", "iso2022_kr"), "이것은한국어문장입니다"),
    "big5hkscs": "這是中文句子的一些漢字",
    **dict.fromkeys(("utf-8", "utf-16-le", "utf-16-be"), "éłжλא日क𝄞"),
}


def deflated(data: bytes, form: int) -> bytes:
    packer = zlib.compressobj(wbits=form)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "none": ("", bytes),
    "gzip": ("gzip", gzip.compress),
    "two members": ("x-gzip", lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:])),
    "zlib": ("deflate", lambda data: deflated(data, 15)),
    "raw": ("Deflate", lambda data: deflated(data, -15)),
    "br": ("br", lambda data: pa.compress(data, "brotli", asbytes=True)),
    "zstd": ("zstd", zstandard.compress),
    "twice": ("gzip, br", lambda data: pa.compress(gzip.compress(data), "brotli", asbytes=True)),
    "stored decoded": ("br", bytes),
    "no coding": ("utf-8", bytes),
}


def chunked(data: bytes) -> bytes:
    parts = [data[start : start + 700] for start in range(0, len(data), 700)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def archive(
    path: Path,
    pages: Iterable[tuple[list[tuple[str, str]], bytes]],
    *,
    statuses: Sequence[str] = (),
    packed: bool = True,
    texts: Sequence[bytes] = (),
) -> None:
    """Responses by their headers and bodies, of status 200 unless others are given, and plain texts behind them."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as sink:
        writer = WARCWriter(sink, gzip=packed)
        for number, (headers, body) in enumerate(pages):
            http = StatusAndHeaders(statuses[number] if statuses else "200 OK", headers, protocol="HTTP/1.1")
            url, payload = f"https://pages.example/{number}", io.BytesIO(body)
            writer.write_record(writer.create_warc_record(url, "response", payload=payload, http_headers=http))
        for text in texts:
            writer.write_record(writer.create_warc_record("https://pages.example/wet", "conversion", io.BytesIO(text)))


def html(text: str, head: str = "") -> str:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in text.split("\n"))
    return f"<html><head>{head}<title>T</title></head><body><article>{body}</article></body></html>"


def made_up(codec: str, draw: random.Random) -> str:
    """Return paragraphs of letters that the charset has."""
    if codec not in ALPHABETS:
        upper = (bytes([byte]).decode(codec, "ignore") for byte in range(0xA0, 0x100))
        ALPHABETS[codec] = "".join(letter for letter in upper if letter.isalpha())
    letters = ALPHABETS[codec] + "abcdefgh"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(60)]
    return f"{' '.join(words[:30])}.\n{' '.join(words[30:])}."


def test_every_label_of_the_standard_in_the_header(tmp_path: Path) -> None:
    labels = [(label, codec) for codec, some in LABELS.items() for label in some.split()]
    labels += [("hz-gb-2312", "hz"), ("ISO-2022-KR", "iso2022_kr"), ("csiso2022kr", "iso2022_kr")]
    assert len(labels) == 228 - 1 - 3
    draw = random.Random(20261127)
    said = [(label, codec, made_up(codec, draw)) for label, codec in labels]
    archive(
        tmp_path / "a.warc.gz",
        (([("Content-Type", f"text/html;charset={label}")], html(text).encode(codec)) for label, codec, text in said),
    )
    found = records_of(tmp_path / "a.warc.gz")
    for (label, _, text), page in zip(said, found, strict=True):
        assert isinstance(page, TextRecord)
        assert page.text == text, label
        assert not page.replaced


def draw_page(draw: random.Random) -> tuple[str, list[tuple[str, str]], bytes]:
    codec = draw.choice([codec for codec in LABELS if not codec.startswith("utf-16")])
    label, text = draw.choice(LABELS[codec].split()), made_up(codec, draw)
    quote = draw.choice(["", "'", '"'])
    where = draw.choice(["header", "meta", "pragma", "both", "mark"])
    head = {
        "meta": f"<!-- <meta charset=koi8-r> --><META  charset={quote}{label.upper()}{quote} />",
        "pragma": f'<meta content="text/html; charset={label}" http-equiv="Content-Type">',
        "both": "<meta charset=cp1251>",
    }.get(where, "")
    data = html(text, head).encode(codec)
    if where == "mark":
        mark, codec = draw.choice(
            [
                (codecs.BOM_UTF8, "utf-8"),
                (codecs.BOM_UTF16_LE, "utf-16-le"),
                (codecs.BOM_UTF16_BE, "utf-16-be"),
            ]
        )
        data = mark + html(text, "<meta charset=koi8-r>").encode(codec)
    kind = "text/html"
    if where in ("header", "both"):
        kind = draw.choice(["text/html", "application/xhtml+xml"]) + f"; x=1; Charset={quote}{label}{quote}"
    coding, pack = CODINGS[draw.choice(list(CODINGS))]
    headers = [("Content-Type", kind), *([("Content-Encoding", coding)] if coding else [])]
    data = pack(data)
    if draw.random() < 0.5:
        headers.append(("Transfer-Encoding", "Chunked"))
        data = chunked(data) if draw.random() < 0.8 else data
    return text, headers, data


@pytest.mark.parametrize("number", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_random_pages_in_any_charset_and_coding(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    pages = [draw_page(draw) for _ in range(number)]
    archive(tmp_path / "a.warc.gz", ((headers, data) for _, headers, data in pages))
    for (text, headers, _), page in zip(pages, records_of(tmp_path / "a.warc.gz"), strict=True):
        assert isinstance(page, TextRecord)
        assert page.text == text, headers


def test_signs_that_only_browsers_read(tmp_path: Path) -> None:
    said = {
        "euc-jp": (b"\xad\xa1\xad\xb5\xfc\xe2", "①Ⅰ髙"),
        "iso-2022-jp": (b"\x1b$B\x2d\x21\x2d\x35\x30\x21\x1b(B", "①Ⅰ亜"),
        "shift_jis": (b"\x87\x40\xfb\xfc", "①髙"),
        "gb2312": (b"\x80 \xe9\x46", "€ 镕"[:2] + b"\xe9\x46".decode("gbk")),
        "iso-8859-1": (b"\x80 \x93q\x94", "€ \u201cq\u201d"),
        "us-ascii": ("é ü".encode(), "é ü"),  # UTF-8, whatever a server says that nobody told
    }
    before, after = html("A line of plain text, which is long enough to be one.\nbehind it: @ stands.").split("@")
    archive(
        tmp_path / "a.warc.gz",
        (
            ([("Content-Type", f"text/html; charset={label}")], before.encode() + data + after.encode())
            for label, (data, _) in said.items()
        ),
    )
    for (_, sign), page in zip(said.values(), records_of(tmp_path / "a.warc.gz"), strict=True):
        assert isinstance(page, TextRecord)
        assert page.text.rpartition(": ")[2].partition(" stands")[0] == sign


def test_a_charset_that_is_not_the_pages_is_passed_over_and_bad_bytes_are_counted(tmp_path: Path) -> None:
    text = made_up("cp1251", random.Random(1))
    kind = [("Content-Type", "text/html; charset=utf-8")]
    page = html(text, "<meta charset=windows-1251>").encode("cp1251")
    cut = html("é" * 400 + "@").encode().replace(b"@", b"\xe9")
    archive(tmp_path / "a.warc.gz", [(kind, page), (kind, cut)])
    of_meta, replaced = records_of(tmp_path / "a.warc.gz")
    assert isinstance(of_meta, TextRecord)
    assert isinstance(replaced, TextRecord)
    assert (of_meta.text, of_meta.replaced) == (text, False)
    assert (replaced.text, replaced.replaced) == ("é" * 400 + "\ufffd", True)


@pytest.mark.parametrize(
    ("kind", "coding", "change"),
    [
        ("text/html", "gzip", lambda data: gzip.compress(data)[:-40]),
        ("text/html", "br", lambda data: CODINGS["br"][1](data)[:-9]),
        ("text/html", "zstd", lambda data: zstandard.compress(data)[:-9]),
        ("text/html", "compress", lambda data: b"\x1f\x9d\x90" + data),
        ("text/html; charset=x-user-defined", "", bytes),
        ("text/html; charset=iso-2022-cn", "", bytes),
    ],
)
def test_a_page_that_cannot_be_decoded_is_a_bad_record_and_not_empty(
    tmp_path: Path, kind: str, coding: str, change: Callable[[bytes], bytes]
) -> None:
    page = html(made_up("utf-8", random.Random(2))).encode()
    headers = [("Content-Type", kind), ("Content-Encoding", coding)]
    archive(tmp_path / "a.warc.gz", [(headers, change(page)), ([("Content-Type", "text/html")], page)])
    with pytest.raises(InputError, match=f"record 0.*{coding or kind.partition('=')[2]}"):
        records_of(tmp_path / "a.warc.gz")
    bad, good = records_of(tmp_path / "a.warc.gz", on_bad_records="skip")
    assert isinstance(bad, BadRecord)
    assert isinstance(good, TextRecord)
    assert good.text


def test_a_page_that_expands_beyond_the_longest_document_is_too_long(tmp_path: Path) -> None:
    headers = [("Content-Type", "text/html"), ("Content-Encoding", "br")]
    archive(tmp_path / "a.warc.gz", [(headers, CODINGS["br"][1](bytes(1 << 22)))])
    (bad,) = records_of(tmp_path / "a.warc.gz", on_bad_records="skip", max_document_bytes=4096)
    assert isinstance(bad, BadRecord)
    assert f"{8 * 4096:,}" in bad.reason


PAGE = """<html><head><title>Rivers</title></head><body><nav><a href="/">Home</a></nav><article>
<p>{0} flows from the mountains to the sea, and many towns lie on its banks, as they did long ago.</p>
<p>Boats carry goods on it, and people have built bridges where it is narrow enough to be crossed.</p>
</article><footer>Imprint</footer></body></html>"""


def write_mixed_archive(path: Path, *, packed: bool) -> None:
    """Two pages, a redirect, a picture and a plain text."""
    bodies = [PAGE.format("The Elbe"), "moved", "no text", PAGE.format("The Danube")]
    kinds = ["text/html; charset=utf-8", "text/html", "image/png", "text/html"]
    pages = [([("Content-Type", kind)], body.encode()) for kind, body in zip(kinds, bodies, strict=True)]
    statuses = ["200 OK", "301 Moved", "200 OK", "200 OK"]
    archive(path, pages, statuses=statuses, packed=packed, texts=[b"The Rhine, as a line of plain text."])


def run(path: Path, out: Path) -> Statistics:
    source = {"source": "web", "files": [str(path)], "fields": {"id": "id", "url": "url", "date": "date"}}
    return preparations.run([source], [], out)


@pytest.mark.parametrize(("name", "packed"), [("a.warc", False), ("a.warc.gz", True), ("a.warc.wet.gz", True)])
def test_pages_and_texts_with_their_headers(tmp_path: Path, name: str, packed: bool) -> None:
    write_mixed_archive(tmp_path / name, packed=packed)
    assert run(tmp_path / name, tmp_path / "out").documents_kept == 3
    rows = preparations.rows_of(tmp_path / "out/documents")
    assert [row["url"].rpartition("/")[2] for row in rows] == ["0", "3", "wet"]
    assert "Elbe" in rows[0]["text"]
    assert not any(word in rows[0]["text"] for word in ("Imprint", "Home", "<p>"))
    assert rows[0]["id"].startswith("<urn:uuid:")
    assert rows[0]["date"].endswith("Z")


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_cut_short_anywhere_is_refused(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.warc.gz" if packed else "a.warc")
    write_mixed_archive(path, packed=packed)
    whole = path.read_bytes()
    for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.77, 0.9, 0.95):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(InputError, match=path.name):
            run(path, tmp_path / f"out{share}")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(b"this is not an archive\n" * 20))
    with pytest.raises(InputError, match=r"a\.warc\.gz"):
        run(tmp_path / "a.warc.gz", tmp_path / "out")
