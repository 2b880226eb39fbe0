"""Which tests are pure; fixtures for all that stores: S3 servers, stores of every kind, faults on the way to them."""

import gc
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

from data_service.store.base import Store
from data_service.store.open import open_store
from tests.support.checks.gpu import decide
from tests.support.checks.pure import FIXTURES, FOREIGN, guarded, is_pure
from tests.support.stores import azurite, ceph
from tests.support.stores.azurite import AzuriteServer
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.gcs import FakeGcs
from tests.support.stores.s3 import S3Server

gc.disable()  # until all is collected: what is imported and collected stays, and looking for cycles in it takes seconds

decide()  # whether Triton's kernels are compiled for a GPU or interpreted on the CPU

_HANDLERS: dict[int, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """What faults/README.md says of tests/faults/test_anything.py."""
    group = parser.getgroup("faults", "random faults (tests/faults/test_anything.py)")
    group.addoption("--seed", type=int, default=1, help="what the faults are drawn from")
    group.addoption("--cycles", type=int, default=200, help="faults of the long form, over all runs")
    group.addoption("--outage-scale", type=float, default=10.0, help="by which outages of 1 s to 10 min are shorter")
    group.addoption("--log-faults", type=Path, help="folder for JSON lines of what struck")
    parser.getgroup("general").addoption(
        "--pure",
        action="store_true",
        help="only tests without processes, servers, Ray and training (tests/README.md)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Ray's test clusters write into this folder, whatever their own is, and only an earlier Ray would have made it.

    A property does not fail because the machine is busy. In the default suite its examples are the same in every run;
    elsewhere they are new ones, which Hypothesis prints where they fail. With --pure they are fewer. Signals that
    whoever started the tests has ignored (nohup, `&` in a script) mean here what they mean to a user's command."""
    for number, handler in _HANDLERS.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    settings.register_profile("whole", deadline=None)
    settings.register_profile("pure", deadline=None, max_examples=4, derandomize=True)
    settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
    default = "default" if config.getoption("markexpr") == "not long" else "whole"
    settings.load_profile("pure" if config.getoption("--pure") else default)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --pure other files are not even imported."""
    test = collection_path.match("test_*.py")
    return True if test and config.getoption("--pure") and not is_pure(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is pure, and with --pure leaves only that. Where a test says how many of its cases are enough by
    default, these are spread evenly, and the others are marked as long."""
    spread = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("default_cases") is not None:
            spread[item.nodeid.partition("[")[0]].append(item)
    for cases in spread.values():
        count = cases[0].get_closest_marker("default_cases").args[0]  # type: ignore[union-attr]
        kept = {len(cases) * place // count for place in range(count)}
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker("long")
    for item in items:
        if is_pure(item.path) and not _needs_a_server(item) and not any(item.iter_markers("cluster")):
            item.add_marker("pure")
    if config.getoption("--pure"):
        others = [item for item in items if not _is_chosen(item)]
        items[:] = [item for item in items if _is_chosen(item)]
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Importing pure tests has imported nothing foreign."""
    if session.config.getoption("--pure") and (found := FOREIGN & sys.modules.keys()):
        raise pytest.UsageError(f"with --pure {', '.join(sorted(found))} was imported: by a conftest.py or a plugin?")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is collected, in a process of xdist or by the one that starts them, which collects nothing itself."""
    gc.freeze()
    gc.enable()


def _is_chosen(item: pytest.Item) -> bool:
    return item.get_closest_marker("pure") is not None and not any(
        item.get_closest_marker(left_out) for left_out in ("long", "heavy")
    )


def _needs_a_server(item: pytest.Item) -> bool:
    """By its fixtures, or as one of the cases of `any_store`."""
    case = getattr(item, "callspec", None)
    store = case.params.get("any_store", "local") if case else "local"
    return store != "local" or not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A pure test fails where it starts a process, talks over a network or imports Ray. After any, torch has as many
    threads as before: those of several test processes on the same cores wait for each other, and a test takes ten
    times as long."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    try:
        with guarded(item.nodeid) if item.get_closest_marker("pure") else nullcontext():
            return (yield)
    finally:
        if torch and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}", "test", "test")
    server.stop()


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    reason = ceph.why_not()
    if reason is not None:
        pytest.skip(f"no real S3 server: {reason}")
    with ceph.shared_server(_common(tmp_path_factory)) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    reason = azurite.why_not()
    if reason is not None:
        pytest.skip(f"no Azurite: {reason}")
    with azurite.shared_server(_common(tmp_path_factory)) as server:
        yield server


def _common(factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of this run share."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGcs]:
    with FakeGcs() as server:
        yield server


@pytest.fixture
def s3(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server in this process (moto), to which the environment points."""
    return moto_server.use(monkeypatch)


@pytest.fixture
def rgw(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server (Ceph), to which the environment points. Mark its users with `pytest.mark.rgw`."""
    return ceph_server.use(monkeypatch)


@pytest.fixture
def gs(gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> FakeGcs:
    """A fake of Google's storage in this process, to which the environment points."""
    pytest.importorskip("obstore", reason="needs maskfleet[clouds]")
    return gcs_server.use(monkeypatch)


@pytest.fixture
def az(azurite_server: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> AzuriteServer:
    """Azurite, to which the environment points. Mark its users with `pytest.mark.azurite`."""
    pytest.importorskip("obstore", reason="needs maskfleet[clouds]")
    return azurite_server.use(monkeypatch)


ANY_STORE = (
    "local",
    "s3",
    pytest.param("rgw", marks=pytest.mark.rgw),
    "gs",
    pytest.param("az", marks=pytest.mark.azurite),
)


@pytest.fixture(params=ANY_STORE)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store: in a folder, on moto's S3, on Ceph's, on a fake of Google's, on Azurite."""
    if request.param == "local":
        return open_store(tmp_path / "store")
    server: S3Server | FakeGcs | AzuriteServer = request.getfixturevalue(request.param)
    return open_store(f"{server.scheme}://{server.new_bucket()}/some/prefix", patience_s=20)


@pytest.fixture
def faults(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before moto's S3, to which the environment points; it injects nothing until told to."""
    with FaultProxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and tokenizer of a module's small runs, which lie beside them. Its `CORPUS` says how large."""
    from tests.support.runs.small_runs import prepare_corpus

    made = tmp_path_factory.mktemp("runs")
    prepare_corpus(made, **getattr(request.module, "CORPUS", {}))
    return made
