"""The live page in a real browser: light and dark, at a desk's and at a phone's width.

The browser is Debian's chromium without a screen, spoken to by its DevTools protocol over two pipes.
"""

import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from data_service.store.open import open_store
from launcher.observe.watch.site import PageServer, Site
from tests.support.runs.untrained import ToldRun

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ABSENT = "no chromium here (Debian: apt-get install chromium)"
_PATIENCE_S = 40.0  # a busy machine
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *(
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-component-update",
        "--mute-audio",
    ),
    *(
        "--disable-features=Translate,OptimizationHints,MediaRouter",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ),
)


class Browser:
    """One tab. `errors`: what its console and its policy complained of."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._left = into, out, b""
        self._number, self._session = 0, ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Shows `url`, and waits until it has been read."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, which may be a promise."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Until `condition`, JavaScript, is true; its value."""
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self.value(condition)) in (None, False, 0, ""):  # an element comes as {}
            assert time.monotonic() < deadline, f"never: {condition}\n{self.value('document.body.innerText')}"
            self.value("new Promise((done) => setTimeout(done, 50))")
        return found

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(found["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        command: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._into, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Log.entryAdded":
                self.errors.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._left:
            assert wait([self._out], max(0.0, deadline - time.monotonic())), "the browser does not answer"
            data = os.read(self._out, 1 << 20)
            assert data, "the browser has ended"
            self._left += data
        data, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its files in `folder`, ended at the end."""
    assert CHROMIUM is not None
    its_in, into = os.pipe()
    out, its_out = os.pipe()

    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    shell = ["bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "bash", *command]
    process = subprocess.Popen(
        shell,
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(into, out)
    finally:
        os.close(into)  # which ends it
        os.close(out)
        try:
            process.wait(_PATIENCE_S)
        finally:
            process.kill()


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)

HOSTILE = "<img src=x onerror=document.title=1>"
_OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
_SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('svg .tick')].map((text) =>
    parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.clientWidth / 440))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@contextmanager
def served(place: Path) -> Iterator[str]:
    server = PageServer(Site(str(place), open_store(place)), "127.0.0.1", 0)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> ToldRun:
    run = ToldRun(tmp_path / "a-name-that-is-as-long-as-names-of-sweeps-are-lr-6e-4-seed-17")
    run.begin(1)
    run.steps(1, 0, 400)
    run.evaluation(1, 400, 5.0)
    run.begin(2, step=300)
    run.steps(2, 300, 500, mlm_loss=4.0)
    run.evaluation(2, 500, 5.0)
    run.event("failed", reason=HOSTILE)
    return run


def test_the_page_is_drawn_again_as_records_come(run: ToldRun, tab: Browser) -> None:
    with served(run.folder) as url:
        tab.open(url)
        tab.wait("document.body.innerText.includes('live, read')")
        assert HOSTILE in tab.value("document.body.innerText")
        tab.value("document.querySelector('details').open = true")
        tab.value("document.querySelector('#s-configuration').marked = true")
        run.steps(2, 500, 600)
        run.event("hang", 2, what="rank 1 has been silent")
        tab.wait("document.body.innerText.includes('step 600 of 1,000')")
        tab.wait("document.querySelector('tr.bad')?.innerText.includes('rank 1 has been silent')")
        assert tab.value("document.querySelector('details').open && document.querySelector('#s-configuration').marked")
        assert tab.value("document.title") == "base - Maskfleet"
        shutil.move(run.folder / "run.json", run.folder / "moved.json")
        tab.wait("document.getElementById('live').innerText.includes('cannot be read since')")
        assert "step 600 of 1,000" in tab.value("document.body.innerText")
        shutil.move(run.folder / "moved.json", run.folder / "run.json")
        tab.wait("document.getElementById('live').innerText.includes('live, read')")
    tab.wait("document.getElementById('live').innerText.includes('does not answer any more')")
    assert "step 600 of 1,000" in tab.value("document.body.innerText")
    refused = [error for error in tab.errors if "Content Security Policy" in error or "exception" in error]
    assert refused == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (768, True), (360, False), (360, True)])
def test_everything_fits_and_can_be_read(run: ToldRun, tab: Browser, width: int, dark: bool, tmp_path: Path) -> None:
    with served(run.folder) as url:
        tab.open(url, width=width, dark=dark)
        tab.wait("document.querySelector('svg .line.s2') && document.querySelector('#s-events td')")
        assert tab.value(_OVERFLOW) <= 0
        assert tab.value(_SMALLEST_TEXT) > 9.5
        light = tab.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] > 128")
        assert light is not dark
        tab.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
