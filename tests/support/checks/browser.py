"""A real browser for tests: Debian's chromium without a screen, spoken to by its DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

    def point(self, x: float, y: float) -> None:
        """The mouse moves there: pixels of the page that is shown."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(found["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        if told.get("method") == "Log.entryAdded":
            self.errors.append(told["params"]["entry"]["text"])
        elif told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["params"]["exceptionDetails"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._out, 1 << 20)
            assert data, "the browser has ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


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
