"""What the watcher serves, over HTTP: the report, how old it is, and refusals."""

import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.base import TEMP_PREFIX, Store
from data_service.store.open import open_store
from launcher.errors import OptionError
from launcher.observe.inspect.report.page import draw_page
from launcher.observe.watch import live
from launcher.observe.watch.live import require_one_run
from launcher.observe.watch.site import PageServer, Site
from launcher.runtime.run.outline import open_outline
from tests.support.checks.html import Page
from tests.support.runs.untrained import ToldRun
from tests.support.stores.faulty import FaultyStore, set_fault

HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e"


class Asked:
    """A server, asked."""

    def __init__(self, server: PageServer) -> None:
        self.port = server.server_address[1]

    def __call__(
        self, path: str = "/", method: str = "GET", host: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": host or f"localhost:{self.port}", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        found = reply.status, dict(reply.getheaders()), reply.read()
        connection.close()
        return found

    def page(self) -> str:
        status, _, body = self()
        assert status == 200
        return body.decode()

    def state(self) -> dict[str, Any]:
        return json.loads(self()[1]["Maskfleet-State"])

    def until(self, what: str) -> str:
        """The page that says so. The watcher draws in its own time; each look is answered at once."""
        for _ in range(600):
            _, headers, body = self()
            if what in body.decode() or what in headers["Maskfleet-State"]:
                return body.decode()
            threading.Event().wait(0.1)
        raise AssertionError(f"never: {what}\n{body.decode()}")


@contextmanager
def serving(place: Path, store: Store | None = None) -> Iterator[Asked]:
    server = PageServer(Site(str(place), store or open_store(place)), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield Asked(server)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawings follow each other at once."""
    monkeypatch.setattr(live, "_MIN_DRAW_WAIT_S", 0.1)
    monkeypatch.setattr(live, "_MIN_WAIT_PER_DRAW_TIME", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> ToldRun:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    run.steps(1, 0, 200)
    run.evaluation(1, 200, 4.0)
    return run


def test_the_page_is_the_report_and_follows_the_records(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        served = without_times(ask.page())
        report = without_times(draw_page(open_outline(str(run.folder)), {}, datetime.now(UTC)))
        assert sections(served) == sections(report)
        assert {"s-head", "s-figures", "s-charts", "s-status", "s-events"} <= sections(served).keys()
        run.steps(1, 200, 300)
        run.event("hang", 1, what="rank 1 has been silent for 60 s")
        ask.until("step 300 of 1,000")
        ask.until("rank 1 has been silent")
        run.begin(2, step=250)
        run.steps(2, 250, 260)
        ask.until("step 260 of")
        ask.until("interrupted: ranks were stuck")


def sections(html: str) -> dict[str, str]:
    return dict(re.findall(r'<section id="([\w-]+)">(.*?)</section>', html, re.DOTALL))


def without_times(html: str) -> str:
    moving = r"report of [\d:T+-]+|[\d.]+m?s? ?\d*s ago|running for [\d.]+s|<b>[\dms. ]+</b><span>wall time"
    return re.sub(moving, "", html)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but those that tell a reader, for a moment, what time it is for the file system."""
    files = (path for path in folder.rglob("*") if not path.name.startswith(TEMP_PREFIX))
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_nothing_but_reading_is_served(run: ToldRun) -> None:
    before = contents(run.folder)
    with serving(run.folder) as ask:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = ask(method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(method="PROPFIND")[0] == 501
        for path in ("/run.json", "/../run.json", "/%2e%2e/run.json", "//etc/passwd"):
            assert ask(path)[0] == 404, path
        status, headers, body = ask(method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 1000
    assert contents(run.folder) == before


def test_only_who_names_this_machine_is_answered(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        for host in ("localhost:9000", "[::1]:80", "LOCALHOST"):
            assert ask(host=host)[0] == 200, host
        for host in ("evil.example:80", "localhost.evil.example", "localhost@evil.example", "@"):
            assert ask(host=host)[0] == 403, host
        assert ask("http://evil.example/")[0] == 403
        with socket.create_connection(("127.0.0.1", ask.port)) as client:
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.0 403")


@given(
    st.lists(st.sampled_from(["localhost", "127.0.0.1", "[::1]", "evil", ".", ":", "@", "/", "80", "?", "#", ",", "%"]))
)
def test_a_host_that_is_answered_is_a_name_and_a_port(parts: list[str]) -> None:
    """By another rule: what is before the last colon and digits is this machine's name or four bytes in decimals."""
    host = "".join(parts)
    server = object.__new__(PageServer)
    server.names = {"localhost"}
    name = re.sub(r":[0-9]{1,5}$", "", host) if not host.endswith("::1") else host
    numbers = [part for part in name.split(".") if part in map(str, range(256))]
    address = len(numbers) == 4 and ".".join(numbers) == name
    assert server.is_allowed_host(host) == (address or name in ("localhost", "[::1]"))


def test_hundreds_of_requests_at_once_are_all_answered(run: ToldRun) -> None:
    with serving(run.folder) as ask, ThreadPoolExecutor(300) as clients:
        barrier = threading.Barrier(300)

        def one(_: int) -> int:
            barrier.wait()
            return ask("/live.js")[0]

        assert set(clients.map(one, range(300))) == {200}


def test_half_sent_requests_keep_nobody_out(run: ToldRun) -> None:
    """More of them than are served at a time; the oldest make room."""
    with serving(run.folder) as ask, ExitStack() as halves:
        began = time.monotonic()
        opened = [halves.enter_context(socket.create_connection(("127.0.0.1", ask.port))) for _ in range(300)]
        for half in opened:
            half.sendall(b"GET / HT")
        assert ask("/live.js")[0] == 200
        assert time.monotonic() - began < 8, "before the first of them is given up"
        opened[0].settimeout(30)
        assert opened[0].recv(12) == b"HTTP/1.0 503", "it is told, not cut off"
        opened[-1].sendall(b"TP/1.0\r\nHost: localhost\r\n\r\n")
        assert opened[-1].recv(12) == b"HTTP/1.0 200"


def test_no_script_but_its_own_may_run(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        for path in ("/", "/live.js", "/nowhere"):
            policy = ask(path)[1]["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'sha256-" in policy
            assert "unsafe" not in policy
        page = Page(ask.page())
        assert [attrs for tag, attrs in page.elements if tag == "script"] == [{"src": "/live.js", "defer": None}]
        assert not [
            attrs for _, attrs in page.elements if any(name.startswith("on") or name == "style" for name in attrs)
        ]


def test_hostile_text_is_text(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "a'\"><b>", versions={HOSTILE: HOSTILE}, created=HOSTILE)
    run.begin(1)
    run.steps(1, 0, 10)
    run.event("failed", reason=HOSTILE)
    run.event(HOSTILE, 1, **{HOSTILE: HOSTILE, "lone": "\ud800", "deep": [[HOSTILE]]})
    run.event("straggler", 1, step=3, rank=1, host=HOSTILE, ratio=2.0, doing=HOSTILE)
    with serving(run.folder) as ask:
        page = Page(ask.until("onerror"))
        assert "img" not in [tag for tag, _ in page.elements]
        assert "\u202e" not in page.text
        assert page.text.count("onerror") >= 6
        (run.folder / "run.json").write_text(f'{{"{HOSTILE}')
        assert ask.until("damaged")
        assert ask.state()["error"].isprintable()


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    require_one_run(str(tmp_path / "later"), open_store(tmp_path / "later"))
    with serving(tmp_path / "later") as ask:
        assert " run " in ask.page()
        ToldRun(tmp_path / "later").begin(1)
        ask.until("world 2")


def test_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    ToldRun(tmp_path / "a").begin(1)
    with pytest.raises(OptionError, match=r"\bfolder\b") as raised:
        require_one_run(str(tmp_path), open_store(tmp_path))
    assert str(tmp_path / "a") in raised.value.remedy
    require_one_run(str(tmp_path / "a"), open_store(tmp_path / "a"))


def test_the_last_good_state_is_shown_with_the_error(run: ToldRun) -> None:
    record = (run.folder / "run.json").read_bytes()
    with serving(run.folder) as ask:
        ask.until("step 200 of")
        (run.folder / "run.json").write_text("{")
        assert "step 200 of" in ask.until("run.json is damaged")
        state = ask.state()
        assert state["age"] >= 0
        assert state["failing"] >= 0
        (run.folder / "run.json").write_bytes(record)
        while ask.state()["error"] is not None:
            threading.Event().wait(0.01)
        run.event("start", 3, step="not a number", world=2)
        run.event("start", 4, time=9e9, step="nonsense")
        assert "step 200 of" in ask.until("cannot be used")


@pytest.mark.long
def test_a_store_that_hangs_keeps_nobody_waiting(run: ToldRun) -> None:
    store = FaultyStore(run.folder)
    with serving(run.folder, store) as ask:
        ask.until("step 200 of")
        set_fault(store, "hangs")
        while (ask.state()["reading"] or 0) < 0.2:
            threading.Event().wait(0.01)
        assert "step 200 of" in ask.page()
        set_fault(store, "down")
        assert "step 200 of" in ask.until("no answer")
        set_fault(store, None)
        run.steps(1, 200, 210)
        ask.until("step 210 of")


@pytest.mark.parametrize("draw", [0, 1, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(2, 8))])
def test_a_page_is_fresh_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: int) -> None:
    """However long nobody has looked: nothing is read meanwhile, and the next page shows what is there now."""
    monkeypatch.setattr(live, "_IDLE_TIMEOUT_S", -1.0)
    monkeypatch.setattr(live, "_FIRST_DRAW_TIMEOUT_S", 60.0)  # a busy machine
    draws, run, done = random.Random(draw), ToldRun(tmp_path), 0
    run.begin(1)
    with serving(tmp_path) as ask:
        for _ in range(4):
            more = draws.randint(1, 50)
            run.steps(1, done, done + more)
            done += more
            assert f"step {done:,} of" in ask.page()
            asleep()


def asleep() -> None:
    """Waits until nothing is read any more."""
    while any(thread.name == "live page" for thread in threading.enumerate()):
        threading.Event().wait(0.01)


def test_many_browsers_cost_one_drawing(run: ToldRun, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []
    monkeypatch.setattr(live, "draw_page", lambda *given: drawn.append(given) or draw_page(*given))
    monkeypatch.setattr(live, "_MIN_DRAW_WAIT_S", 600.0)
    with serving(run.folder) as ask, ThreadPoolExecutor(30) as browsers:
        pages = list(browsers.map(lambda _: ask.page(), range(30)))
    assert len(drawn) == len(set(pages)) == 1


def test_a_port_that_is_taken(run: ToldRun) -> None:
    with serving(run.folder) as ask, pytest.raises(OptionError, match=r"\bport \d+: "):
        PageServer(Site(str(run.folder), open_store(run.folder)), "127.0.0.1", ask.port)
