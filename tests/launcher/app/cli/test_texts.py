"""A sample of the inputs: never more than asked for, from all over, the same each time."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from data_service.ingest.options import BuildOptions
from launcher.app.cli.texts import sample_texts

OPTIONS = BuildOptions(split_bytes=4 << 20)
SKIP = OPTIONS.model_copy(update={"on_bad_records": "skip"})


def sample(folder: Path, limit: int, options: BuildOptions = OPTIONS) -> list[str]:
    return list(sample_texts([str(folder)], options, limit))


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def lines(count: int, length: int = 10_000) -> bytes:
    return b"".join(json.dumps({"text": f"{n:06d} " + "x" * length}).encode() + b"\n" for n in range(count))


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_limit_inside_a_file(tmp_path: Path, suffix: str, pack: type[bytes]) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(lines(1400)))
    assert size(sample(tmp_path, 1_000_000)) == 1_000_000
    assert size(sample(tmp_path, 100_000_000)) == 1400 * 10_007


def test_it_is_from_all_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(2400))
    numbers = [int(text[:6]) for text in sample(tmp_path, 2_000_000)]
    assert numbers == sorted(set(numbers))
    tenths = {number * 10 // 2400 for number in numbers}
    assert len(tenths) >= 4
    assert sample(tmp_path, 2_000_000) == sample(tmp_path, 2_000_000)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.text(max_size=40), max_size=5), min_size=1, max_size=6), st.integers(1, 400))
def test_never_more_than_the_limit_nor_less_than_there_is(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("sample")
    for number, texts in enumerate(files):
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.json.gz").write_bytes(gzip.compress(content.encode()))
    there = size([text for texts in files for text in texts])
    found = size(sample(folder, limit))
    assert found <= min(there, limit)
    assert found > min(there, limit) - 4 * len(files)  # a character is never cut


def test_bad_records_are_refused_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"text": "good"}\noops\n'))
    (tmp_path / "b.docx").write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.json\.gz, line 2: not JSON"):
        sample(tmp_path, 1000)
    capsys.readouterr()
    assert sample(tmp_path, 1000, SKIP) == ["good"]
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith(": 1")
    assert told[1].startswith(f"  {tmp_path}/b.docx (")
    assert told[2].endswith(": 1")
    assert told[3].startswith(f"  {tmp_path}/a.json.gz, line 2: not JSON")
