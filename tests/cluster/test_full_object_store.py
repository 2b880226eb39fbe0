"""Ray's object stores are too small for what is asked of them, or full, and spilling to a disk fails: the samples are
the same, or a typed error says what to change."""

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import ray

from data_service.errors import BuildFailed, CorpusError
from data_service.ingest.build import build_corpus
from data_service.samples.spec import StreamSpec
from data_service.service import tasks
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, start_feed
from data_service.stream.stream import Stream
from tests.support.data.corpora import assert_same, random_block, source_of, spec_of, write_corpus
from tests.support.data.raw_text import SMALL, tokenizer_folder, write_jsonl

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

STORE = 80_000_000  # bytes; Ray takes no less than 75 MiB
MUCH = 10 * STORE


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> StreamSpec:
    """An epoch of twice the store's size."""
    blocks = [random_block(seed, 1_000_000) for seed in range(45)]
    uri = write_corpus(tmp_path_factory.mktemp("corpus"), blocks, [random_block(99, 3000)])
    return spec_of(source_of(uri), window={"least_tokens": 2_000_000}, length=128)


@contextmanager
def small_store(disk: str) -> Iterator[None]:
    """A Ray whose spilling finds its disk `full`, `gone`, or as it should be."""
    with tempfile.TemporaryDirectory(prefix="mf-", dir="/tmp") as name:
        spilled = Path(name, "spilled")
        spilled.mkdir()
        if disk == "full":
            mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(spilled)]
            if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
                pytest.skip("mounting a small disk needs root")
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                _temp_dir=f"{name}/r",
                object_store_memory=STORE,
                log_to_driver=False,
                object_spilling_directory=str(spilled),
            )
            if disk == "gone":
                for folder in (*spilled.iterdir(), spilled):
                    folder.rmdir()
            yield
        finally:
            ray.shutdown()
            if disk == "full":
                subprocess.run(["umount", "--lazy", str(spilled)], check=True)


@pytest.mark.parametrize("draw", range(6))
@pytest.mark.parametrize("disk", ["full", "gone", "large"])
def test_more_memory_is_allowed_than_there_is(spec: StreamSpec, disk: str, draw: int) -> None:
    """Two readers share the steps, as ranks do, and each announces all that it will read."""
    draws = random.Random(f"{disk} {draw}")
    workers, memory = draws.randint(1, 4), draws.choice([STORE // 2, STORE, 2 * STORE, MUCH])
    reference, step = Stream(spec), draws.randint(200, 20_000)
    with small_store(disk):
        feed = start_feed(FeedConfig(workers=workers, memory=memory, slab_tokens=draws.choice([1 << 16, 1 << 19])))

        def read(number: int) -> None:
            client = FeedClient(feed, spec)
            starts = range(number * step // 2, client.samples_per_epoch - step // 2, step)
            client.prefetch([(0, start, start + step // 2) for start in starts])
            for start in starts:
                assert_same(client.read(0, start, start + step // 2), reference.read(0, start, start + step // 2))
            client.close()

        with ThreadPoolExecutor(2) as pool:
            for reading in [pool.submit(read, number) for number in range(2)]:
                reading.result()


def fill() -> list["ray.ObjectRef[np.ndarray]"]:
    """The store, until nothing more of a MiB goes in."""
    kept = list["ray.ObjectRef[np.ndarray]"]()
    with suppress(ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
        while len(kept) < STORE >> 20:
            kept.append(ray.put(np.ones(1 << 20, np.uint8)))
    return kept


def test_others_fill_the_store_for_a_while(spec: StreamSpec, caplog: pytest.LogCaptureFixture) -> None:
    with small_store("full"):
        client = FeedClient(start_feed(FeedConfig(workers=1, memory=STORE)), spec)
        others = fill()
        assert others
        with ThreadPoolExecutor(1) as pool:
            reading, tick = pool.submit(client.read, 0, 0, 2000), Event()
            while "2 of 8 in a row" not in caplog.text:
                assert not reading.done()
                tick.wait(0.05)
            others.clear()
            assert_same(reading.result(), Stream(spec).read(0, 0, 2000))
        client.close()


def test_others_fill_the_store_and_stay(spec: StreamSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_FULL_STORE_BUILDS", 3)
    with small_store("full"):
        client = FeedClient(start_feed(FeedConfig(workers=1, memory=STORE)), spec)
        others = fill()
        with pytest.raises(BuildFailed, match=f"window 0 of epoch 0.* {STORE >> 20} MiB") as raised:
            client.read(0, 0, 2000)
        assert "memory" in raised.value.remedy
        others.clear()
        assert client.read(0, 0, 2000).rows == 2000, "what was cured is no longer a failure"
        client.close()


def test_a_build_through_a_full_store_is_named_and_continued(tmp_path: Path) -> None:
    """A compressed file goes from its reader to the workers through the store."""
    draws = random.Random(1)
    texts = (" ".join(str(draws.getrandbits(60)) for _ in range(20_000)) for _ in range(20))
    write_jsonl(tmp_path / "inputs/a.jsonl.gz", list(texts))
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    options = SMALL.model_copy(update={"workers": 2, "split_bytes": 2_000_000})

    def built(out: str) -> dict[str, bytes]:
        build_corpus([str(tmp_path / "inputs")], str(tmp_path / out), tokenizer, options, lambda progress: None)
        return {str(path.name): path.read_bytes() for path in (tmp_path / out).rglob("*.tar")}

    with small_store("full"):
        others = fill()
        with pytest.raises(CorpusError, match=r"\bstore\b"):
            built("corpus")
        others.clear()
        assert built("corpus") == built("another")
