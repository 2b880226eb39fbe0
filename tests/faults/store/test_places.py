"""The places of a run: copied, moved, gone for a while, closed to writers for a while. The losses, samples and weights
are those of a run that nobody disturbed. Ranks without Ray; the command's part in it is `test_anything.py`'s.
"""

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from data_service.store.base import Store
from data_service.store.open import open_store
from tests.support.ranks.run_group import finish, run_group
from tests.support.runs import small_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server
from tests.support.stores.service import Service

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

MOST_ENDS = 4  # by error, until the place is back


@pytest.fixture(scope="module")
def calm(folder: Path) -> str:
    """The run that nobody disturbs."""
    return finish(small_runs.new_run(folder, "calm"), 2)


def contents(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def copied(source: str, target: str) -> str:
    to = open_store(target)
    for key, data in contents(open_store(source)).items():
        to.put(key, data)
    return target


@pytest.mark.parametrize("draw", range(9))
def test_copied_or_moved_it_goes_on_and_neither_disturbs_the_other(
    folder: Path, calm: str, s3: S3Server, tmp_path: Path, draw: int
) -> None:
    """Stopped after any step, or killed there. Both go on at the same time, from the same checkpoint."""
    draws = random.Random(draw)
    uri = small_runs.new_run(folder, f"original-{draw}")
    step = draws.randint(3, small_runs.STEPS - 1)
    if draws.random() < 0.5:
        finish(uri, 2, stop_at=step)
    else:
        run_group(uri, 2, kill={0: step, 1: step})
    target = draws.choice([str(tmp_path / "elsewhere"), f"s3://{s3.new_bucket()}/there"])
    before = contents(open_store(uri))
    copy = copied(uri, target)
    if draws.random() < 0.5:
        uri = shutil.move(uri, f"{folder}/moved-{draw}")
    assert contents(open_store(uri)) == before
    with ThreadPoolExecutor(2) as pool:
        for going in (pool.submit(finish, copy, 2), pool.submit(finish, uri, draws.choice([1, 2]))):
            going.result()
    for one in (copy, uri):
        small_runs.ensure_whole(one)
    small_runs.ensure_same(copy, calm, small_runs.STEPS)
    assert small_runs.ledger(uri) == small_runs.ledger(calm)
    assert small_runs.digests(uri) == small_runs.digests(calm)
    assert small_runs.losses(uri) == pytest.approx(small_runs.losses(calm), rel=1e-5)


class Closed:
    """The store refuses what `touches` says, from the `first` such request on, until it has refused `count`."""

    def __init__(self, proxy: FaultProxy, prefix: str, methods: tuple[str, ...], first: int, count: int) -> None:
        self.came = self.refused = 0
        self._prefix, self._methods, self._first, self._count = prefix, methods, first, count
        proxy.only = self.touches

    def touches(self, method: str, path: str) -> bool:
        if method not in self._methods or not unquote(path).startswith(self._prefix):
            return False
        self.came += 1
        closed = self._first <= self.came and self.refused < self._count
        self.refused += closed
        return closed

    @property
    def over(self) -> bool:
        return self.refused >= self._count


@pytest.mark.parametrize(
    ("service", "draw"),
    [
        *(("s3", draw) for draw in range(9)),
        *(("gs", draw) for draw in range(2)),
        *(pytest.param("az", draw, marks=pytest.mark.azurite) for draw in range(2)),
    ],
    indirect=["service"],
)
@pytest.mark.parametrize("what", ["corpus", "run"])
def test_a_place_that_is_gone_or_closed_for_a_while(
    folder: Path,
    calm: str,
    faults: FaultProxy,
    service: Service,
    what: str,
    draw: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The corpus answers 404 or 503; the run's store refuses to be written, with 403 or 503. Ranks that end say which
    place it is; the next ones go on."""
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "2")
    draws = random.Random(f"{what} {draw}")
    bucket = service.new_bucket()
    root = f"{service.scheme}://{bucket}/here"
    for name in ("corpus", "tokenizer"):
        copied(f"{folder}/{name}", f"{root}/{name}")
    uri = small_runs.new_run(root, "run")
    faults.always = draws.choice(["no such key", "slow down"] if what == "corpus" else ["denied", "slow down"])
    most = draws.randint(1, 30 if faults.always == "slow down" else 3)  # others are not tried again, but end the ranks
    methods = ("GET", "HEAD") if what == "corpus" else ("PUT", "POST", "DELETE")
    place = f"{urlsplit(service.endpoint).path}/{bucket}/here/{what}"
    closed = Closed(faults, place, methods, draws.randint(1, 40), most)
    ends, ended = 0, run_group(uri, 1)
    while ended.codes != [0]:
        ends += 1
        assert root in ended.output
        assert ends <= MOST_ENDS or not closed.over, ended.output
        ended = run_group(uri, 1)
    print(f"{what}: {faults.always}, {closed.refused} of {closed.came} requests refused, {ends} ends")
    small_runs.ensure_whole(uri)
    assert small_runs.ledger(uri) == small_runs.ledger(calm)
    assert small_runs.digests(uri) == small_runs.digests(calm)
    assert small_runs.losses(uri) == pytest.approx(small_runs.losses(calm), rel=1e-5)


@pytest.mark.parametrize("draw", range(4))
def test_a_folder_of_text_that_is_renamed_away_and_back(folder: Path, calm: str, tmp_path: Path, draw: int) -> None:
    draws = random.Random(draw)
    for name in ("corpus", "tokenizer"):
        shutil.copytree(folder / name, tmp_path / name)
    uri, corpus = small_runs.new_run(tmp_path, "run"), tmp_path / "corpus"
    away = threading.Timer(draws.uniform(0, 12), lambda: corpus.rename(tmp_path / "away"))
    away.start()
    ended = run_group(uri, 2)
    away.join()
    if ended.codes != [0, 0]:
        assert str(corpus) in ended.output
    (tmp_path / "away").rename(corpus)
    finish(uri, 2)
    small_runs.ensure_same(uri, calm, small_runs.STEPS)
