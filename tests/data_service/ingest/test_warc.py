"""Web archives: the text of pages with what their headers say, and archives that are damaged."""

import gzip
import io
from pathlib import Path

import pytest

from data_service.errors import InputError
from data_service.prepare.statistics import Statistics
from tests.support.data import preparations

pytest.importorskip("warcio", reason="needs maskfleet[prepare]")
pytest.importorskip("trafilatura", reason="needs maskfleet[prepare]")

PAGE = """<html><head><title>Rivers</title></head><body><nav><a href="/">Home</a></nav><article>
<p>{0} flows from the mountains to the sea, and many towns lie on its banks, as they did long ago.</p>
<p>Boats carry goods on it, and people have built bridges where it is narrow enough to be crossed.</p>
</article><footer>Imprint</footer></body></html>"""


def write_archive(path: Path, *, packed: bool) -> bytes:
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    sink = io.BytesIO()
    writer = WARCWriter(sink, gzip=packed)
    for number, (status, kind, body) in enumerate(
        [
            ("200 OK", "text/html; charset=utf-8", PAGE.format("The Elbe")),
            ("301 Moved", "text/html", "moved"),
            ("200 OK", "image/png", "no text"),
            ("200 OK", "text/html", PAGE.format("The Danube")),
        ]
    ):
        headers = StatusAndHeaders(status, [("Content-Type", kind)], protocol="HTTP/1.0")
        url = f"https://rivers.example/{number}"
        record = writer.create_warc_record(url, "response", payload=io.BytesIO(body.encode()), http_headers=headers)
        writer.write_record(record)
    text = io.BytesIO(b"The Rhine, as a line of plain text.")
    writer.write_record(writer.create_warc_record("https://rivers.example/wet", "conversion", payload=text))
    path.write_bytes(sink.getvalue())
    return sink.getvalue()


def run(path: Path, out: Path) -> Statistics:
    source = {"source": "web", "files": [str(path)], "fields": {"id": "id", "url": "url", "date": "date"}}
    return preparations.run([source], [], out)


@pytest.mark.parametrize(("name", "packed"), [("a.warc", False), ("a.warc.gz", True), ("a.warc.wet.gz", True)])
def test_pages_and_texts_with_their_headers(tmp_path: Path, name: str, packed: bool) -> None:
    write_archive(tmp_path / name, packed=packed)
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
    whole = write_archive(path, packed=packed)
    for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.77, 0.9, 0.95):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(InputError, match=path.name):
            run(path, tmp_path / f"out{share}")


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(b"this is not an archive\n" * 20))
    with pytest.raises(InputError, match=r"a\.warc\.gz"):
        run(tmp_path / "a.warc.gz", tmp_path / "out")
