"""What the watcher serves, asked over HTTP: pages, news, and refusals."""

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
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.base import TEMPORARY, Store
from data_service.store.open import open_store
from launcher.errors import OptionError
from launcher.observe.watch import reader
from launcher.observe.watch.site import Server, Site
from tests.support.runs.untrained import ToldRun
from tests.support.stores.faulty import FaultyStore, set_fault

HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e"


class Asked:
    """A server, asked."""

    def __init__(self, server: Server) -> None:
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

    def page(self, path: str = "/") -> str:
        status, _, body = self(path)
        assert status == 200
        return body.decode()

    def news(self, path: str = "/?live=") -> dict[str, Any]:
        return json.loads(self(path)[2])

    def until(self, what: str, path: str = "/?live=") -> dict[str, Any]:
        """News that say so. The watcher reads in its own time; each look is answered at once."""
        for _ in range(600):
            if what in json.dumps(found := self.news(path)):
                return found
            threading.Event().wait(0.1)
        raise AssertionError(f"never: {what}\n{found}")


@contextmanager
def serving(place: Path, store: Store | None = None) -> Iterator[Asked]:
    server = Server(Site(str(place), store or open_store(place)), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield Asked(server)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once."""
    monkeypatch.setattr(reader, "_EVERY_S", 0.1)
    monkeypatch.setattr(reader, "_SHARE", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> ToldRun:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    run.steps(1, 0, 200)
    run.evaluation(1, 200, 4.0)
    return run


class Tags(HTMLParser):
    """Names and attributes of all elements; they must nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_run_has_the_sections_of_its_report(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        page = Tags(ask.page())
        for words in ("running", "step 200 of 1,000", "MLM loss", "Ranks", "Data service", "Events"):
            assert words in page.text
        assert "with 2 ranks" in page.text
        assert "Checkpoints" in page.text
        for axis in ("tokens", "hours"):
            current = [attrs for _, attrs in Tags(ask.page(f"/?axis={axis}")).tags if "aria-current" in attrs]
            assert [attrs["data-axis"] for attrs in current] == [axis]


def test_news_come_once_and_only_if_there_are_some(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        first = ask.until("step 200 of")
        assert "sections" not in ask.news(f"/?live={first['version']}")
        run.steps(1, 200, 300)
        run.event("hang", 1, what="rank 1 has been silent for 60 s")
        second = ask.until("rank 1 has been silent")
        assert second["version"] != first["version"]
        assert "step 300 of 1,000" in ask.until("step 300 of")["sections"]["head"]
        run.begin(2, step=250)
        run.steps(2, 250, 260)
        assert "step 260 of 1,000" in ask.until("step 260 of")["sections"]["head"]
        ask.until("interrupted: ranks were stuck")
        run.event("end", step=1000)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but those that tell a reader, for a moment, what time it is for the file system."""
    files = (path for path in folder.rglob("*") if not path.name.startswith(TEMPORARY))
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_nothing_but_reading_is_served(run: ToldRun) -> None:
    before = contents(run.folder)
    with serving(run.folder) as ask:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers, _ = ask(method=method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")
        assert ask(method="PROPFIND")[0] == 501
        for path in (
            "/run.json",
            "/../run.json",
            "/run/../run.json",
            "/run/%2e%2e%2frun.json",
            "//etc/passwd",
        ):
            assert ask(path)[0] == 404, path
        status, headers, body = ask(method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 1000
    assert contents(run.folder) == before


def test_only_who_names_this_machine_is_answered(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        for host in ("localhost", "localhost:9000", "127.0.0.1", "[::1]:80", "LOCALHOST"):
            assert ask(host=host)[0] == 200, host
        others = "evil.example evil.example:80 localhost.evil.example 127.0.0.1.evil.example 127.0.0.1:80.evil.example"
        others += (
            " localhost:18765.evil.example:80 evil.example@localhost localhost@evil.example localhost/evil"
        )
        for host in (*others.split(), "localhost,evil.example", "[::1]evil.example", "localhost:", "", "["):
            assert ask(host=host or "@")[0] == 403, host


@given(
    st.lists(
        st.sampled_from(
            ["localhost", "127.0.0.1", "[::1]", "evil", ".", ":", "@", "/", "80", "?", "#", ",", "%"]
        )
    )
)
def test_a_host_that_is_answered_is_a_name_and_a_port(parts: list[str]) -> None:
    """By another rule: what stands before the last colon and digits is one of the names."""
    host = "".join(parts)
    server = object.__new__(Server)
    server.names = {"localhost"}
    name = re.sub(r":[0-9]{1,5}$", "", host) if not host.endswith("::1") else host
    assert server.is_named(host) == (name in ("localhost", "127.0.0.1", "[::1]"))


def test_a_request_for_another_host_by_its_target_or_a_second_header(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        assert ask("http://evil.example/")[0] == 403
        with socket.create_connection(("127.0.0.1", ask.port)) as client:
            client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.0 403")


def test_hundreds_of_requests_at_once_are_all_answered(run: ToldRun) -> None:
    with serving(run.folder) as ask, ThreadPoolExecutor(300) as clients:
        barrier = threading.Barrier(300)

        def one(_: int) -> int:
            barrier.wait()
            return ask("/watch.css")[0]

        assert set(clients.map(one, range(300))) == {200}


def test_half_sent_requests_keep_nobody_out(run: ToldRun) -> None:
    """More of them than are served at a time; the oldest make room."""
    with serving(run.folder) as ask, ExitStack() as halves:
        began = time.monotonic()
        opened = [halves.enter_context(socket.create_connection(("127.0.0.1", ask.port))) for _ in range(300)]
        for half in opened:
            half.sendall(b"GET / HT")
        assert ask("/watch.css")[0] == 200
        assert time.monotonic() - began < 8, "before the first of them is given up"
        opened[-1].sendall(b"TP/1.0\r\nHost: localhost\r\n\r\n")
        assert opened[-1].recv(12) == b"HTTP/1.0 200"


def test_no_script_but_its_own_may_run(run: ToldRun) -> None:
    with serving(run.folder) as ask:
        for path in ("/", "/watch.js", "/nowhere"):
            policy = ask(path)[1]["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
        page = Tags(ask.page())
        assert [attrs for tag, attrs in page.tags if tag == "script"] == [{"src": "/watch.js", "defer": None}]
        assert not [
            attrs for _, attrs in page.tags if any(name.startswith("on") or name == "style" for name in attrs)
        ]


def test_hostile_text_is_text(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "runs" / "a'\"><b>", versions={HOSTILE: HOSTILE}, created=HOSTILE)
    run.begin(1)
    run.steps(1, 0, 10)
    run.event("failed", reason=HOSTILE)
    run.event(HOSTILE, 1, **{HOSTILE: HOSTILE, "lone": "\ud800", "deep": [[HOSTILE]]})
    run.event("straggler", 1, step=3, rank=1, host=HOSTILE, ratio=2.0, doing=HOSTILE)
    ToldRun(tmp_path / "runs" / "plain").begin(1)
    for place, paths in ((tmp_path / "runs", ("/", "/run/a%27%22%3E%3Cb%3E")), (run.folder, ("/",))):
        with serving(place) as ask:
            ask.until("plain" if place != run.folder else "onerror")
            for path in paths:
                page = Tags(ask.page(path))
                assert "img" not in [tag for tag, _ in page.tags]
                assert "\u202e" not in page.text
            assert "onerror" in page.text


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path / "later") as ask:
        assert " run " in ask.page()
        ToldRun(tmp_path / "later").begin(1)
        assert "running" in ask.until("started with 2 ranks")["sections"]["head"]


def test_the_last_good_state_is_shown_with_the_error(run: ToldRun) -> None:
    record = (run.folder / "run.json").read_bytes()
    with serving(run.folder) as ask:
        ask.until("step 200 of")
        (run.folder / "run.json").write_text("{")
        news = ask.until("run.json is damaged")
        assert "step 200 of" in json.dumps(news["sections"])
        assert news["age"] >= 0
        assert news["failing"] >= 0
        assert "MLM loss" in ask.page()
        (run.folder / "run.json").write_bytes(record)
        while ask.news()["error"] is not None:
            threading.Event().wait(0.01)
        run.event("start", 3, step="not a number", world=2)
        run.event("start", 4, time=9e9, step="nonsense")
        assert "step 200 of" in json.dumps(ask.until("cannot be used")["sections"])


@pytest.mark.long
def test_a_store_that_hangs_keeps_nobody_waiting(run: ToldRun) -> None:
    store = FaultyStore(run.folder)
    with serving(run.folder, store) as ask:
        ask.until("step 200 of")
        set_fault(store, "hangs")
        while (ask.news()["reading"] or 0) < 0.2:
            threading.Event().wait(0.01)
        assert "step 200 of" in ask.page()
        set_fault(store, "down")
        assert "step 200 of" in json.dumps(ask.until("no answer")["sections"])
        set_fault(store, None)
        run.steps(1, 200, 210)
        ask.until("step 210 of")


@pytest.mark.parametrize(
    "draw", [0, 1, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(2, 8))]
)
def test_a_page_is_fresh_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: int
) -> None:
    """However long nobody has looked: nothing is read meanwhile, and the next page shows what is there now."""
    monkeypatch.setattr(reader, "_IDLE_S", -1.0)
    draws, folder = random.Random(draw), draw % 2 == 1
    run = ToldRun(tmp_path / "a" if folder else tmp_path)
    run.begin(1)
    done = 0
    with serving(tmp_path) as ask:
        for _ in range(4):
            more = draws.randint(1, 50)
            run.steps(1, done, done + more)
            done += more
            path = draws.choice(["/", "/run/a"] if folder else ["/", "/?axis=tokens"])
            assert f"step {done:,} of" in ask.page(path) or f"{done:,} of" in ask.page(path)
            asleep()


@pytest.mark.long
def test_what_was_read_before_is_shown_where_a_store_hangs_on_opening(
    run: ToldRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_IDLE_S", -1.0)
    store = FaultyStore(run.folder)
    with serving(run.folder, store) as ask:
        assert "step 200 of" in ask.page()
        asleep()
        set_fault(store, "hangs")
        news = ask.news()
        assert "step 200 of" in json.dumps(news["sections"])
        assert news["reading"] >= 2
        assert news["age"] > news["reading"]
        set_fault(store, None)


def asleep() -> None:
    """Waits until nothing is read any more."""
    while any(thread.name == "watch" for thread in threading.enumerate()):
        threading.Event().wait(0.01)


def test_a_folder_compares_its_runs(tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b", "c"]):
        run = ToldRun(tmp_path / name)
        run.begin(1, now=1e9 + number)
        run.steps(1, 0, 100 + number)
        run.evaluation(1, 100, 3.0 + number)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "broken" / "recipe.yaml").write_text("{")
    with serving(tmp_path) as ask:
        ask.until("MLM loss, held out")
        whole = Tags(ask.page("/"))
        boxes = [attrs for tag, attrs in whole.tags if tag == "input"]
        assert [attrs["value"] for attrs in boxes] == ["a", "b", "broken", "c"]
        assert [attrs["value"] for attrs in boxes if "checked" in attrs] == ["a", "b", "c"]
        assert "unreadable" in whole.text
        ask.until(">c</span>", "/?live=&run=c&run=a&axis=hours")
        charts = [
            json.loads(attrs["data-readings"] or "")
            for _, attrs in Tags(ask.page("/?run=c&run=a&axis=hours")).tags
            if "data-readings" in attrs
        ]
        assert {series["name"] for chart in charts for series in chart["series"]} == {"a", "c"}
        assert "h of training" in json.dumps(charts)
        assert "step 102 of" in ask.page("/run/c")
        assert ask("/run/nobody")[0] == 404


def test_many_browsers_cost_one_reading_and_one_drawing(
    run: ToldRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launcher.observe.watch import pages

    drawn: list[object] = []
    draw = pages.run_sections
    monkeypatch.setattr(pages, "run_sections", lambda *given: drawn.append(given) or draw(*given))
    monkeypatch.setattr(reader, "_EVERY_S", 600.0)
    with serving(run.folder) as ask:
        threads = [threading.Thread(target=ask.page) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(drawn) == 1


def test_a_port_that_is_taken(run: ToldRun) -> None:
    with serving(run.folder) as ask, pytest.raises(OptionError, match=r"\bport \d+: "):
        Server(Site(str(run.folder), open_store(run.folder)), "127.0.0.1", ask.port)
