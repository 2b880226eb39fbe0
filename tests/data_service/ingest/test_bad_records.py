"""Bad records: skipped, counted and listed where that is asked for, whatever happens to the build meanwhile."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_service.errors import CorpusError, InputError
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Progress
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, Killed, build, killed_after

SKIP = BuildOptions(
    on_bad_records="skip",
    split_bytes=20_000,
    max_document_bytes=5_000,
    heldout_fraction=0,
    block_tokens=8_000,
)
GOOD = [text[:300] for text in DOCUMENTS[:60]]


def write_inputs(folder: Path) -> dict[str, str]:
    """Good records in every format, and bad ones among them: their places, and what is wrong with them."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}).encode() for text in GOOD]
    lines[3:3] = [b"{oops"]
    lines[20:20] = [
        b'{"body": "x"}',
        b'{"text": 7}',
        b'{"text": "\xff"}',
        b'{"text": "' + b"x" * 50_000 + b'"}',
    ]
    lines += [b'{"text": "a\\ud800"}', b'{"text": "' + b"y" * 5_001 + b'"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.json.gz").write_bytes(gzip.compress(b'\n{"text": "fine"}\n[1]\n'))
    (folder / "c.csv").write_bytes(b'text,n\nok,1\n"two\nlines",2\nx\nalso ok,3\n"open,4\n')
    pq.write_table(pa.table({"text": ["p", None, "q"]}), folder / "d.parquet")
    (folder / "e.txt").write_bytes(b"\xff\xff")
    (folder / "f.txt").write_bytes(b"long " * 2_000)
    return {
        "a.jsonl, line 4": "not JSON",
        "a.jsonl, line 21": "no field 'text'",
        "a.jsonl, line 22": "is int, not text",
        "a.jsonl, line 23": "is not UTF-8",
        "a.jsonl, line 24": "more than 40,000 bytes",
        f"a.jsonl, line {len(lines) - 1}": "surrogate",
        f"a.jsonl, line {len(lines)}": "more than 5,000 bytes",
        "b.json.gz, line 3": "not an object",
        "c.csv, line 5": "1 fields",
        "c.csv, line 7": "not CSV",
        "d.parquet, row 1": "is null",
        "e.txt": "byte 0 is not UTF-8",
        "f.txt": "more than 5,000 bytes",
    }


def assert_told(corpus: Path, inputs: Path, expected: dict[str, str]) -> None:
    stats = corpus_stats(str(corpus))
    assert stats.counts["skipped"] == len(expected)
    assert stats.counts["documents_read"] == len(GOOD) + 1 + 3 + 2
    for told, (place, reason) in zip(stats.skipped, expected.items(), strict=True):
        assert told.startswith(f"{inputs}/{place}: ")
        assert reason in told


def test_they_are_counted_and_listed_by_file_and_line(tmp_path: Path) -> None:
    expected = write_inputs(tmp_path / "inputs")
    build(tmp_path / "inputs", tmp_path / "corpus", SKIP)
    assert_told(tmp_path / "corpus", tmp_path / "inputs", expected)
    with pytest.raises(CorpusError, match=r"\b13 bad"):
        build(tmp_path / "inputs", tmp_path / "corpus", SKIP.model_copy(update={"on_bad_records": "error"}))
    build(tmp_path / "inputs", tmp_path / "corpus", SKIP)


@pytest.mark.parametrize("reports", [2, 9])
def test_they_are_listed_by_a_build_that_was_killed_and_continued(tmp_path: Path, reports: int) -> None:
    expected = write_inputs(tmp_path / "inputs")
    with pytest.raises(Killed):
        build(tmp_path / "inputs", tmp_path / "corpus", SKIP, killed_after(reports))
    build(tmp_path / "inputs", tmp_path / "corpus", SKIP)
    assert_told(tmp_path / "corpus", tmp_path / "inputs", expected)


@pytest.mark.long
def test_the_first_hundred_are_listed(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/a.jsonl").write_text('{"text": "good"}\n' + "bad\n" * 10_000)
    build(tmp_path / "inputs", tmp_path / "corpus", SKIP)
    stats = corpus_stats(str(tmp_path / "corpus"))
    assert stats.counts["skipped"] == 10_000
    assert [told.split(": ")[0].rpartition(" ")[2] for told in stats.skipped] == [str(n) for n in range(2, 102)]


@pytest.mark.long
def test_a_refused_record_discards_no_scan(tmp_path: Path) -> None:
    """Asked again to skip, the build reads only what it had not read."""
    write_inputs(tmp_path / "inputs")
    (tmp_path / "inputs/0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    strict = SKIP.model_copy(update={"on_bad_records": "error", "max_document_bytes": 1 << 20})
    with pytest.raises(InputError, match=r"a\.jsonl, line 4: not JSON.*\n.*--on-bad-records skip"):
        build(tmp_path / "inputs", tmp_path / "corpus", strict)
    seen: list[Progress] = []
    skip = strict.model_copy(update={"on_bad_records": "skip"})
    build(tmp_path / "inputs", tmp_path / "corpus", skip, seen.append)
    first = next(progress for progress in seen if progress.stage == "reading")
    assert first.done >= 10
    assert first.total > first.done


def test_nothing_but_bad_records_is_an_error_that_shows_one(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/a.jsonl").write_text('{"body": "x"}\n' * 9)
    with pytest.raises(InputError, match=r"\b9 bad.*a\.jsonl, .*'text'"):
        build(tmp_path / "inputs", tmp_path / "corpus", SKIP)
