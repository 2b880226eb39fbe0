"""Real text of five kinds for `prepare.py`, made of what lies on a machine: python tests/bench/prepare_inputs.py --help

HTML of documentation becomes a web archive, a dump of Wikipedia's form, and plain texts, by turns. Every text is one
that people wrote; only its packing is ours. How many records each kind holds is counted here, not by the code that is
tried.
"""

import ast
import bz2
import gzip
import html
import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer
from program import BenchError, note, run

_PAGES = 100  # a stream, as in Wikipedia's dumps
_SHARD = 64 << 20
_DROPPED = re.compile(r"<(script|style|nav|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_BREAK = re.compile(r"<(?:p|div|br|li|tr|h\d|pre)\b[^>]*>", re.IGNORECASE)
_HEADING = re.compile(r"<h[1-4]\b[^>]*>(.*?)</h[1-4]>", re.DOTALL | re.IGNORECASE)
_LINK = re.compile(r'<a\b[^>]*href="([^"#:]+)"[^>]*>([^<]{2,60})</a>', re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_BLANK = re.compile(r"\s*\n\s*\n\s*")
_PLAIN = (".txt", ".rst", ".md")
_PAGED = (".html", ".htm", ".page")
_MANUAL = re.compile(r"\.[1-8]\w*\.gz$")
_MACRO, _FONT = re.compile(r"^\.\S*[ \t]*", re.MULTILINE), re.compile(r"\\f.|\\&")
_BINARY = (".ps.gz", ".pdf.gz", ".svg.gz", ".eps.gz")
_HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo>
    <dbname>docwiki</dbname>
    <base>https://docs.example/wiki/Main_Page</base>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Talk</namespace>
      <namespace key="6" case="first-letter">File</namespace>
      <namespace key="14" case="first-letter">Category</namespace>
    </namespaces>
  </siteinfo>
"""


@dataclass
class Made:
    """One kind: its files, the bytes of text in them before packing, and the number of records."""

    files: list[Path]
    text_bytes: int = 0
    records: int = 0


def make_inputs(
    folder: Path, documentation: Sequence[Path], packages: Sequence[Path], prose: Sequence[Path], most: int
) -> dict[str, Made]:
    """Make the inputs in a folder and return them by kind: `notes`, `wiki`, `web`, `packages`, `prose`.

    `most`: bytes of text after which no more documentation is taken.

    Raises:
        BenchError: a folder holds no text.
    """
    folder.mkdir(parents=True)
    made = {name: Made([]) for name in ("notes", "wiki", "web")}
    web, wiki = _Web(folder / "web.warc.gz", made["web"]), _Wiki(folder, made["wiki"])
    notes = _Notes(folder / "notes", made["notes"])
    for path in _files(documentation, (*_PAGED, *_PLAIN, ".gz")):
        if sum(each.text_bytes for each in made.values()) >= most:
            break
        raw = _read(path)
        text = raw.decode(errors="replace")
        turn = int.from_bytes(blake2b(str(path).encode(), digest_size=2).digest()) % 16
        if turn < 9 or (path.suffix in _PLAIN and turn > 9):
            notes.add(_stripped(text) if path.suffix in _PAGED else text)
        elif turn < 13 or len(raw) > 400_000 or path.suffix == ".gz":
            wiki.add(path, text, turn)
        else:
            web.add(path, raw)
    notes.close()
    wiki.close()
    web.close()
    made["packages"] = _packages(folder, packages)
    made["prose"] = _prose(folder, prose)
    if empty := [name for name, each in made.items() if not each.records]:
        raise BenchError(f"no text for {', '.join(empty)}", remedy="name other folders and files")
    (folder / "made.json").write_text(
        json.dumps({name: [each.text_bytes, each.records] for name, each in made.items()})
    )
    return made


def _files(folders: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in suffixes and not path.is_symlink() and path.is_file():
                yield path


def _read(path: Path) -> bytes:
    """Return a text, of manual pages without their macros."""
    if path.suffix != ".gz":
        return path.read_bytes()
    if path.name.endswith(_BINARY):
        return b""
    with gzip.open(path, "rb") as file:
        data = file.read()
    if not _MANUAL.search(path.name):
        return b"" if b"\0" in data else data
    return _FONT.sub("", _MACRO.sub("", data.decode(errors="replace"))).encode(errors="replace")


def _stripped(page: str) -> str:
    text = _TAG.sub("", _BREAK.sub("\n", _DROPPED.sub("", page)))
    return _BLANK.sub("\n\n", html.unescape(text)).strip()


class _Notes:
    """A file for each text, in folders of a thousand."""

    def __init__(self, folder: Path, made: Made) -> None:
        self._folder, self._made = folder, made
        made.files.append(folder)

    def add(self, text: str) -> None:
        path = self._folder / f"{self._made.records // 1000:03}" / f"{self._made.records:06}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode(errors="replace")
        path.write_bytes(data)
        self._made.records += 1
        self._made.text_bytes += len(data)

    def close(self) -> None: ...


class _Wiki:
    """A multistream dump: pages of documentation with headings and links as wikitext; some talk pages and redirects."""

    def __init__(self, folder: Path, made: Made) -> None:
        self._made, self._pages = made, list[str]()
        self._path = folder / "docwiki-1-pages-articles-multistream.xml.bz2"
        self._file = self._path.open("wb")
        self._file.write(bz2.compress(_HEAD.encode()))
        made.files.append(self._path)

    def add(self, path: Path, text: str, turn: int) -> None:
        page = _HEADING.sub(lambda found: f"\n== {_TAG.sub('', found[1]).strip()} ==\n", text)
        page = _LINK.sub(lambda found: f"[[{_TAG.sub('', found[1])}|{found[2]}]]", page)
        source = _stripped(page)
        space, redirect = (1, "") if turn == 9 and len(source) < 3_000 else (0, "")
        if turn == 10 and len(source) < 2_000:
            redirect = '    <redirect title="Main Page" />\n'
        number = self._made.records
        made = (
            f"  <page>\n    <title>{escape(path.name)} {number}</title>\n    <ns>{space}</ns>\n    <id>{number}</id>\n"
            f"{redirect}    <revision>\n      <id>{number}</id>\n      <timestamp>2026-01-01T00:00:00Z</timestamp>\n"
            f'      <model>wikitext</model>\n      <text xml:space="preserve">{escape(_valid(source))}</text>\n'
            "    </revision>\n  </page>\n"
        )
        self._made.records += 1
        self._made.text_bytes += len(made.encode(errors="replace"))
        self._pages.append(made)
        if len(self._pages) == _PAGES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(bz2.compress("".join(self._pages).encode(errors="replace")))
        self._pages = []

    def close(self) -> None:
        self._flush()
        self._file.write(bz2.compress(b"</mediawiki>\n"))
        self._file.close()


def _valid(text: str) -> str:
    """Return the text without characters that XML does not allow."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", " ", text)


class _Web:
    """A web archive: each page with its request and, now and then, a redirect."""

    def __init__(self, path: Path, made: Made) -> None:
        from warcio.warcwriter import WARCWriter

        self._made, self._file = made, path.open("wb")
        self._writer: Any = WARCWriter(self._file, gzip=True)
        made.files.append(path)

    def add(self, path: Path, raw: bytes) -> None:
        url = f"https://docs.example{path}"
        if self._made.records % 50 == 0:
            self._write(url + "/old", "301 Moved", b"moved")
        self._write(url, "200 OK", raw)
        self._made.records += 1
        self._made.text_bytes += len(raw)

    def _write(self, url: str, status: str, body: bytes) -> None:
        from warcio.statusandheaders import StatusAndHeaders

        headers = StatusAndHeaders(status, [("Content-Type", "text/html")], protocol="HTTP/1.1")
        asked = StatusAndHeaders("GET / HTTP/1.1", [], is_http_request=True)
        for kind, payload, top in (("request", b"", asked), ("response", body, headers)):
            record = self._writer.create_warc_record(url, kind, payload=io.BytesIO(payload), http_headers=top)
            self._writer.write_record(record)

    def close(self) -> None:
        self._file.close()


def _packages(folder: Path, packages: Sequence[Path]) -> Made:
    """JSON lines: the documentation inside Python modules, with the licence of the package that they belong to."""
    made = Made([])
    licences = {
        found.parent.name: _licence(found) for each in packages for found in each.glob("*.dist-info/METADATA")
    }
    by_package = {name.partition("-")[0].lower(): licence for name, licence in licences.items()}
    file: Any = None
    for path in _files(packages, (".py", *_PLAIN)):
        root = next(each for each in packages if path.is_relative_to(each))
        text = _documentation(path)
        if len(text) < 200:
            continue
        package = path.relative_to(root).parts[0].partition("-")[0].lower()
        line = json.dumps(
            {"text": text, "id": str(path.relative_to(root)), "licence": by_package.get(package)}
        )
        if not made.files or made.files[-1].stat().st_size > _SHARD:
            made.files.append(folder / f"packages-{len(made.files)}.jsonl")
            file = made.files[-1].open("w", encoding="utf-8")
        file.write(line + "\n")
        made.records += 1
        made.text_bytes += len(text.encode(errors="replace"))
    if file is not None:
        file.close()
    return made


def _licence(metadata: Path) -> str | None:
    found = re.search(
        r"^License(?:-Expression)?: (.{2,60})$", metadata.read_text("utf-8", "replace"), re.MULTILINE
    )
    return found[1] if found else None


def _documentation(path: Path) -> str:
    """Return a text as it is; of a module all its documentation strings."""
    text = path.read_text("utf-8", "replace")
    if path.suffix != ".py":
        return text
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    parts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(filter(None, parts)).encode(errors="replace").decode()


def _prose(folder: Path, prose: Sequence[Path]) -> Made:
    made = Made([])
    for path in prose:
        made.files.append(folder / f"prose-{path.name}")
        shutil.copyfile(path, made.files[-1])
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                made.records += bool(line.strip())
                made.text_bytes += len(line)
    return made


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    documentation: Annotated[list[Path], typer.Option(help="Folders with HTML and texts.")],
    packages: Annotated[list[Path], typer.Option(help="Folders with Python packages.")],
    prose: Annotated[list[Path], typer.Option(help="JSON lines, also .gz.")],
    most: Annotated[int, typer.Option(help="Bytes of text of documentation.")] = 10**9,
) -> None:
    """Make inputs of five kinds, and say how much text each holds."""
    for name, made in make_inputs(folder, documentation, packages, prose, most).items():
        note(f"{name}: {made.records:,} records, {made.text_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    run(main)
