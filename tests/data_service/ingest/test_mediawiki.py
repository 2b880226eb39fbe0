"""Dumps of Wikipedia: which pages are documents, what is read of them, however a dump is packed, cut and damaged."""

import bz2
import re
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from data_service.ingest.files import open_decompressed
from data_service.ingest.inputs import InputFile, list_inputs
from data_service.ingest.wikitext import wikitext_to_plain_text
from data_service.prepare.statistics import Statistics
from tests.support.data import preparations
from tests.support.data.preparations import rows_of
from tests.support.data.raw_text import DOCUMENTS
from tests.support.data.text_files import PACKED

pytest.importorskip("mwparserfromhell", reason="needs maskfleet[prepare]")

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
FIELDS = {"id": "id", "url": "url", "date": "date", "language": "language"}
Page = tuple[str, int, bool, str]  # title, namespace, whether it redirects, wikitext


def page(number: int, of: Page) -> str:
    title, space, redirects, text = of
    redirect = '    <redirect title="Else" />\n' if redirects else ""
    return f"""  <page>
    <title>{escape(title)}</title>
    <ns>{space}</ns>
    <id>{number}</id>
{redirect}    <revision>
      <id>{number + 7_000}</id>
      <timestamp>2026-01-{number % 28 + 1:02}T00:00:00Z</timestamp>
      <model>wikitext</model>
      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>
    </revision>
  </page>
"""


def streams(pages: list[Page]) -> list[str]:
    """Return the parts that a multistream dump packs one by one."""
    made = [page(number, each) for number, each in enumerate(pages)]
    return [HEAD, *("".join(made[start : start + 3]) for start in range(0, len(made), 3)), "</mediawiki>\n"]


def write(path: Path, pages: list[Page], *, multistream: bool = False) -> Path:
    parts = streams(pages) if multistream else ["".join(streams(pages))]
    path.write_bytes(b"".join(PACKED[path.suffix if path.suffix in PACKED else ""](p.encode()) for p in parts))
    return path


def run(path: Path, out: Path, *, chunk: int = 1 << 14, **more: Any) -> Statistics:
    source = {"source": "wiki", "files": [str(path)], "fields": FIELDS, **more}
    return preparations.run([source], [], out, chunk=chunk)


TEXTS = [" ".join(re.findall(r"\w+", text))[:3_000] for text in DOCUMENTS[:9]]
PAGES = st.lists(
    st.tuples(
        st.text("Aäß &/?%<", min_size=1, max_size=9).map(lambda title: f"T{title.strip()}"),
        st.sampled_from([0, 0, 0, 1, 10]),
        st.sampled_from([False, False, True]),
        st.sampled_from(["", "short & <page> <", *TEXTS]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=PAGES, suffix=st.sampled_from(sorted(PACKED)), multistream=st.booleans())
def test_articles_are_documents_and_every_other_page_is_counted(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    pages: list[Page],
    suffix: str,
    multistream: bool,
) -> None:
    """Whole or cut into pieces, in however many streams it is packed."""
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096)
    folder = tmp_path_factory.mktemp("dump")
    path = write(folder / f"a-pages-articles1.xml-p1p9{suffix}", pages, multistream=multistream)
    if not any(space == 0 and not redirects and text for _, space, redirects, text in pages):
        return
    statistics = run(path, folder / "out", chunk=4096)
    kept = {row["id"]: row for row in rows_of(folder / "out/documents")}
    dropped = {row["id"]: row["reason"] for row in rows_of(folder / "out/dropped")}
    assert statistics.documents_read == len(pages) == len(kept) + len(dropped)
    for number, (_, space, redirects, text) in enumerate(pages):
        name = f"dewiki:{number}"
        if space:
            assert dropped[name] == "other_namespace"
        elif redirects:
            assert dropped[name] == "redirect"
        elif not text:
            assert dropped[name] == "empty"
        else:
            assert kept[name]["text"].split() == text.split()
            assert kept[name]["url"].startswith("https://de.wikipedia.org/wiki/T")
            assert kept[name]["language"] == "de"
            assert kept[name]["date"] == f"2026-01-{number % 28 + 1:02}T00:00:00Z"


WIKITEXT = """{{Infobox|name={{nested|x}}}}
'''The Elbe''' ([[Czech]]: ''Labe'' {{lang|cs|x}}) is a [[river|big river]] &ndash; long.<ref name="a">A book.</ref>
[[Datei:Elbe.jpg|mini|A picture of [[Dresden]]]]
{| class="wikitable"
| cell || cell
|}
== Course ==
* It flows to [https://example.org the sea].<!-- not said -->
* {{empty}}

{{Clear}}


It is ({{lang|x}}) wide.
[[Kategorie:Rivers]] [[Category:Water]] __NOTOC__
<gallery>
Datei:B.jpg|More
</gallery><math>x^2</math>
"""


READ = [
    "The Elbe (Czech: Labe ) is a big river \N{EN DASH} long.",
    *("", "Course", "", "It flows to the sea.", "", "It is wide."),
]


def test_what_one_reads_of_wikitext(tmp_path: Path) -> None:
    path = write(tmp_path / "w.xml", [("Elbe", 0, False, WIKITEXT)])
    run(path, tmp_path / "out")
    (row,) = rows_of(tmp_path / "out/documents")
    assert row["text"].split("\n") == READ


MARKS = [
    "{{",
    "}}",
    "{|",
    "\n|}",
    "[[",
    "]]",
    "|",
    "<ref>",
    "</ref>",
    "<!--",
    "-->",
    "<b>",
    "[http://x ",
    "&#",
    "''",
    "\n* ",
    "\n==",
]


@given(st.lists(st.sampled_from([*MARKS, "a", " ", "Datei:"]), max_size=40))
def test_no_wikitext_fails(parts: list[str]) -> None:
    text = wikitext_to_plain_text("".join(parts), frozenset({"datei"}))
    assert text == text.strip()
    assert not any(mark in text for mark in ("{{", "{|", "<b>", "''"))


@pytest.mark.parametrize("marks", [*([mark] for mark in MARKS), ["{{a|", "[[b|"], ["{|\n", "{{a|\n"]], ids=str)
def test_broken_markup_takes_no_longer(marks: list[str]) -> None:
    """The parser alone takes minutes for most of them."""
    began = time.process_time()
    wikitext_to_plain_text("".join(marks) * 4_000, frozenset())
    assert time.process_time() - began < 10


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    for name, data in (
        ("pom.xml", b"<project>\n</project>\n"),
        ("a.xml.bz2", b"no bz2 at all"),
        ("b.xml.xz", bz2.compress(b"<mediawiki>\n</mediawiki>\n")),
        ("c.xml", HEAD.encode() + b"  <page>\n<title>x</title></pag>\n  </page>\n</mediawiki>\n"),
        ("d.xml", HEAD.encode() + b"  <page>\n<title>x\xff</title>\n  </page>\n</mediawiki>\n"),
        ("e.xml", HEAD.encode() + b"  <page>\n<title>&evil;</title>\n  </page>\n</mediawiki>\n"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=name):
            run(tmp_path / name, tmp_path / f"out-{name}")


def test_no_entity_is_ever_expanded(tmp_path: Path) -> None:
    """The declaration stands before the pages, and is never parsed."""
    bomb = '<!DOCTYPE x [<!ENTITY a "AAAA"><!ENTITY b "&a;&a;">]>\n'
    text = bomb + "".join(streams([("T", 0, False, "x")])).replace(">x<", ">&b;<")
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(InputError, match=r"a\.xml, byte \d+: .*entity"):
        run(tmp_path / "a.xml", tmp_path / "out")


def test_a_folder_of_dumps_is_listed_without_its_index_and_other_xml(tmp_path: Path) -> None:
    for name in (
        "de-1-pages-articles-multistream1.xml-p1p9.bz2",
        "de-1-pages-articles-multistream-index1.txt-p1p9.bz2",
        "de-1-pages-articles-multistream-index.txt.bz2",
        "pom.xml",
        "notes.xml.txt",
    ):
        (tmp_path / name).write_bytes(b"")
    listing = list_inputs([str(tmp_path)])
    assert [(file.key, file.format, file.compression) for file in listing.files] == [
        ("de-1-pages-articles-multistream1.xml-p1p9.bz2", "mediawiki", "bz2"),
        ("notes.xml.txt", "txt", ""),
    ]


@given(
    st.lists(st.binary(max_size=3_000), min_size=1, max_size=4),
    st.sampled_from(["gz", "zst", "bz2", "xz"]),
    st.integers(0, 3),
)
def test_streams_one_after_another_give_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], kind: str, padding: int
) -> None:
    folder = tmp_path_factory.mktemp("x")
    between = b"\0" * 4 * padding if kind == "xz" else b""
    data = b"".join(PACKED[f".{kind}"](part) + between for part in parts)
    (folder / "a").write_bytes(data)
    with open_decompressed(InputFile(str(folder), "a", len(data), "txt", kind)) as stream:  # type: ignore[arg-type]
        assert stream.read() == b"".join(parts)
