"""Builds of other settings that were begun in the same output: none of what they wrote counts."""

import gzip
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_service.corpus.corpus import verify_corpus
from data_service.errors import CorpusError, InputError, TokenizerError
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.raw_text import Killed, files_of, ignore_progress, write_jsonl

WORDS = [a + b for a in "abcdefgh" for b in "abcdefgh"]
SMALL_SPLITS = BuildOptions(heldout_fraction=0.2, split_bytes=4096, block_tokens=1000)
LARGER_SPLITS = SMALL_SPLITS.model_copy(update={"split_bytes": 9000})
PACKED_BYTES = 16_000


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two that cut alike and number in another way, so that shards have other bytes of the same number."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for seed in (1, 2):
        drawn = random.Random(seed)
        text = (" ".join(drawn.choices(WORDS, range(1, 65), k=4000)) for _ in range(3))
        save_tokenizer(train_tokenizer("wordpiece", text, 60, allow_fewer_ids=True), f"{folder}/{seed}")
    return [f"{folder}/{seed}" for seed in (1, 2)]


def packed(lines: bytes) -> bytes:
    """Stored, not compressed, and filled up by the name of the file: other texts, the same size."""
    room = PACKED_BYTES - len(gzip.compress(lines, 0))
    data = io.BytesIO()
    with gzip.GzipFile("x" * (room - 1), "wb", 0, data, 0) as file:
        file.write(lines)
    return data.getvalue()


def inputs_of(drawn: random.Random, folder: Path) -> list[dict[Path, bytes]]:
    """The contents of two files, as they are at first, edited, and with a byte that is no UTF-8: all of one size."""
    texts = [" ".join(drawn.choices([*WORDS, *["жж"] * 40], k=30)) for _ in range(90)]
    plain = write_jsonl(folder / "in/a.jsonl", texts[:45]).read_bytes()
    other = write_jsonl(folder / "in/b.jsonl", texts[45:]).read_bytes()
    gone = other[: other.rindex(b"\n", 0, -1000) + 1]
    (folder / "in/b.jsonl").unlink()
    one, two = folder / "in/a.jsonl", folder / "in/b.jsonl.gz"
    edited = plain.replace(b"ab", b"ba")
    return [
        {one: plain, two: packed(other)},
        {one: edited, two: packed(other)},
        {one: plain, two: packed(gone)},
        {one: plain.replace(b"ab", b"a\xff", 1), two: packed(other)},
    ]


@contextmanager
def killed_before(write: int, key: str = "") -> Iterator[None]:
    """Raises `Killed` in place of the `write`-th object with `key` in its name that is written from now on."""
    left, usual = [write], os.replace

    def replace(*paths: Any) -> None:
        left[0] -= key in str(paths[1])
        if left[0] == 0:
            raise Killed
        usual(*paths)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", replace)
        yield


def put(contents: dict[Path, bytes]) -> None:
    for path, data in contents.items():
        path.write_bytes(data)


def end_of(work: Callable[[], object]) -> type[BaseException] | None:
    """What ended it; None if it came to its end."""
    try:
        work()
    except (Killed, InputError, TokenizerError, CorpusError) as error:
        return type(error)
    return None


def run(folder: Path, setting: tuple[str, BuildOptions], out: str, accept: bool = True) -> None:
    accepted = {"accept_loss": frozenset({"unknown"} if accept else ())}
    options = setting[1].model_copy(update=accepted)
    build_corpus([f"{folder}/in"], f"{folder}/{out}", setting[0], options, ignore_progress)


def assert_undisturbed(folder: Path, setting: tuple[str, BuildOptions]) -> None:
    """The corpus `out` is whole, and the one that is built elsewhere."""
    run(folder, setting, "whole")
    assert verify_corpus(f"{folder}/out").damage == ()
    assert files_of(folder / "out") == files_of(folder / "whole")


@pytest.mark.parametrize("seed", [5, 8, 11])  # in each, what another build left once passed for the last one's
def test_settings_that_alternate_in_one_output_leave_the_last_ones_corpus(
    tmp_path: Path, tokenizers: list[str], seed: int
) -> None:
    drawn = random.Random(seed)
    contents = inputs_of(drawn, tmp_path)
    settings = [(one, options) for one in tokenizers for options in (SMALL_SPLITS, LARGER_SPLITS)]

    setting, end = settings[0], None
    for _ in range(6):
        put(drawn.choice(contents))
        setting = setting if end is Killed else drawn.choice(settings)
        with killed_before(drawn.choice([0, drawn.randint(1, 80)])):
            end = end_of(lambda: run(tmp_path, setting, "out", accept=False))  # noqa: B023
        assert end is not None
    put(contents[0])
    last = setting if end is Killed else drawn.choice(settings)
    run(tmp_path, last, "out")
    assert_undisturbed(tmp_path, last)


def test_an_edit_that_is_taken_back_after_a_kill_leaves_no_shard_of_the_edited_text(
    tmp_path: Path, tokenizers: list[str]
) -> None:
    first, edited, *_ = inputs_of(random.Random(1), tmp_path)
    setting = (tokenizers[0], SMALL_SPLITS)
    put(first)
    with pytest.raises(TokenizerError):
        run(tmp_path, setting, "out", accept=False)
    put(edited)
    with killed_before(1, "receipts/write"), pytest.raises(Killed):
        run(tmp_path, setting, "out")
    put(first)
    run(tmp_path, setting, "out")
    assert_undisturbed(tmp_path, setting)
