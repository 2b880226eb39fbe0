"""Text in any encoding gives the corpus of the same text in UTF-8; a wrong encoding is named, or warned of."""

import codecs
import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from data_service.errors import InputError
from data_service.ingest.documents import read_documents
from data_service.ingest.encodings import is_garbled
from data_service.ingest.files import open_text
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord
from data_service.ingest.streamed import PieceReader
from data_service.ingest.tasks import InputSplit, plan_splits, streamed_files
from data_service.stream.statistics import corpus_stats
from launcher.app.cli.main import app
from tests.support.data.raw_text import build
from tests.support.data.text_files import PACKED, records_of, texts_of

# Encodings with the letters that all text in them may have.
LETTERS = {
    "iso-8859-1": "aeß äöü é",
    "cp1252": "aß „…€",
    "GB18030": "a中文、。🙂é",
    "shift_jis": "aかなカナ漢字、",
    "euc-kr": "a한글 ",
    "koi8-r": "aяж ",
    "utf-16-be": "aß中🙂 ",
    "utf-16": "aß中🙂 ",
    "utf-32": "aß中🙂 ",
    "utf-8-sig": "aß中🙂 ",
}
MARKED = ("utf-16", "utf-32", "utf-8-sig")


def as_file(texts: list[str], kind: str) -> str:
    """Documents as the text of a file of a kind."""
    if kind == ".txt":
        return "\n\n".join(texts)
    if kind == ".jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    out = io.StringIO()
    delimiter = {".tsv": "\t", ".csv": ","}[kind]
    csv.writer(out, quoting=csv.QUOTE_ALL, delimiter=delimiter).writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue()


def documents_of(path: Path, options: BuildOptions) -> list[str]:
    """All documents, of split and streamed files too, as a build reads them."""
    files = list_inputs([str(path)], options.encoding).files
    sizes = {}
    for file in streamed_files(files, options):
        with open_text(file) as stream:
            sizes[file.uri] = len(stream.read())
    reader, found = PieceReader(), []
    for split in plan_splits(files, options, sizes):
        if split.streamed_piece is not None:
            split = InputSplit((reader.read(split.streamed_piece, options),))
        found += [document.text for document in read_documents(split, options)]
    return found


@st.composite
def encoded_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    name = draw(st.sampled_from(sorted(LETTERS)))
    text = st.text(st.sampled_from(LETTERS[name]), min_size=1, max_size=30).map(lambda text: f"a{text}a")
    return name, draw(st.lists(text, min_size=1, max_size=12))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    encoded_texts(),
    st.sampled_from([".txt", ".jsonl", ".csv", ".tsv"]),
    st.sampled_from(sorted(PACKED)),
    st.integers(1, 400),
)
@example(("utf-16", ["a中a"] * 5), ".jsonl", "", 300)
@example(("iso-8859-1", ["aüa"] * 5), ".txt", ".gz", 1)
def test_documents_come_back_from_any_encoding(
    tmp_path_factory: pytest.TempPathFactory,
    encoded: tuple[str, list[str]],
    kind: str,
    packed: str,
    repeats: int,
) -> None:
    name, few = encoded
    texts = few * repeats
    path = tmp_path_factory.mktemp("in") / f"a{kind}{packed}"
    path.write_bytes(PACKED[packed](as_file(texts, kind).encode(name)))
    declared = "utf-8" if name in MARKED else name
    options = BuildOptions(encoding=declared, split_bytes=4096, txt_documents="blank_line")
    assert [text.strip() for text in documents_of(path, options)] == texts


def test_a_mark_says_more_than_what_was_declared(tmp_path: Path) -> None:
    for mark, name in ((codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF8, "utf-8")):
        (tmp_path / "a.txt").write_bytes(mark + "Bäume".encode(name))
        assert documents_of(tmp_path / "a.txt", BuildOptions(encoding="latin-1")) == ["Bäume"]


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.sampled_from(["GB18030", "utf-16-le", "shift_jis"]))
def test_bad_bytes_spoil_only_their_records(
    tmp_path_factory: pytest.TempPathFactory, spoilt: list[bool], name: str
) -> None:
    """A lone surrogate's bytes, or a lead byte with no second one."""
    bad = b"\x00\xd8" if name == "utf-16-le" else b"\xfd\xff"
    lines = ["aあa".encode(name) + bad * is_bad + "a\n".encode(name) for is_bad in spoilt]
    path = tmp_path_factory.mktemp("in") / "a.csv"
    path.write_bytes("text\n".encode(name) + b"".join(lines))
    options = BuildOptions(encoding=name, on_bad_records="skip")
    assert [isinstance(record, BadRecord) for record in records_of(path, options)] == spoilt
    replaced = texts_of(path, options.model_copy(update={"on_bad_bytes": "replace"}))
    assert all(("\ufffd" in text) == is_bad for text, is_bad in zip(replaced, spoilt, strict=True))
    if any(spoilt):
        with pytest.raises(InputError) as failure:
            records_of(path, BuildOptions(encoding=name))
        assert f"line {spoilt.index(True) + 2}:" in failure.value.problem
        assert "--encoding" in str(failure.value.remedy)


GERMAN = "Die Bäume blühen über den grünen Hügeln, und jedes Mädchen trägt große Körbe.\n"
CHINESE = "今天天气很好、我们一起去公园散步、看见了许多花。\n"


@pytest.mark.parametrize(
    ("text", "encoding", "proposed"),
    [
        (GERMAN, "iso-8859-1", "cp1252"),
        ("plain text\n" * 20_000 + GERMAN, "iso-8859-1", "cp1252"),
        (CHINESE, "gb18030", "gb18030"),
        (CHINESE, "utf-16-le", "utf_16_le"),
    ],
)
@pytest.mark.parametrize("pack", PACKED)
def test_the_remedy_names_the_encoding_and_that_one_reads_the_text(
    tmp_path: Path, text: str, encoding: str, proposed: str, pack: str
) -> None:
    path = tmp_path / f"a.txt{pack}"
    path.write_bytes(PACKED[pack](text.encode(encoding)))
    with pytest.raises(InputError) as failure:
        documents_of(path, BuildOptions())
    assert f"--encoding {proposed}" in str(failure.value.remedy)
    assert documents_of(path, BuildOptions(encoding=proposed)) == [text]


@settings(deadline=None)
@given(
    st.text(st.characters(categories=["L", "N", "P", "Z"]), min_size=20),
    st.sampled_from(["utf-16-le", "utf-32-be"]),
)
def test_text_looks_like_text_and_not_in_another_encoding(text: str, name: str) -> None:
    assert not is_garbled(text)
    wrong = ("plain " + text).encode(name).decode("utf-8", errors="replace")
    assert is_garbled(wrong)


def test_text_with_nuls_between_its_letters_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    plain = "".join(f"{number} words without any letter beyond ASCII in them. " for number in range(400))
    (tmp_path / "in/a.txt").write_bytes(plain.encode("utf-16-le"))
    build(tmp_path / "in", tmp_path / "corpus", BuildOptions())
    assert corpus_stats(str(tmp_path / "corpus")).counts["odd"] == 1
    shown = CliRunner().invoke(app, ["corpus", "stats", str(tmp_path / "corpus")])
    assert shown.exit_code == 0
    assert "--encoding" in shown.stderr


@pytest.mark.parametrize("name", ["utf-99", "base64", "idna", "punycode", "unicode_escape", ""])
def test_names_of_no_encoding_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        BuildOptions(encoding=name)


@settings(deadline=None)
@given(
    st.sampled_from(",;\t|"),
    st.sampled_from([".csv", ".tsv"]),
    st.lists(st.text(st.sampled_from('aü,;|\t" \n'), max_size=8), min_size=1, max_size=5),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_the_delimiter_is_found_or_given(
    tmp_path_factory: pytest.TempPathFactory, delimiter: str, suffix: str, texts: list[str], quoting: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / f"a{suffix}"
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([["id", "text", "note"], *([number, text, "n"] for number, text in enumerate(texts))])
    path.write_text(out.getvalue(), "utf-8", newline="")
    assert documents_of(path, BuildOptions()) == texts
    assert documents_of(path, BuildOptions(delimiter=delimiter)) == texts


def test_the_error_names_the_columns_between_semicolons(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;inhalt;datum\n1;Text;heute\n")
    with pytest.raises(InputError, match="id, inhalt, datum") as failure:
        documents_of(tmp_path / "a.csv", BuildOptions())
    assert "--text-field" in str(failure.value.remedy)
    assert documents_of(tmp_path / "a.csv", BuildOptions(text_field="inhalt")) == ["Text"]
    for wrong in ('"', "\n", ";;", ""):
        with pytest.raises(ValidationError):
            BuildOptions(delimiter=wrong)


def test_a_column_that_is_not_found_in_another_encoding_names_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    text = "Die Bäume grünen, und über die Brücke führen Züge nach Osnabrück."
    path.write_bytes(("Nummer;Überschrift\r\n" + f"1;{text}\r\n" * 5).encode("latin-1"))
    with pytest.raises(InputError, match="'Überschrift'") as caught:
        documents_of(path, BuildOptions(text_field="Überschrift"))
    assert "--encoding cp1252" in caught.value.remedy
    declared = BuildOptions(text_field="Überschrift", encoding="latin-1")
    assert documents_of(path, declared) == [text] * 5
