"""The driver's part in publishing a run to trackers: it keeps a process for each, which may hang, crash or fail to
start.

Only the end of the command waits for these processes, at most `LAST_WORDS_S`. Records that are not published then are
published by the next start.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from data_service.store.base import Store
from data_service.store.local import LocalStore
from launcher.observe.trackers.clients import PublishRequest
from launcher.observe.trackers.publish import HOPELESS, LAST_WORDS_S
from launcher.runtime.recipe.identity import flatten
from launcher.runtime.recipe.operation import Mlflow, Wandb
from launcher.runtime.recipe.schema import Recipe

_POLL_S = 15.0
_AGAIN_S = 60.0  # seconds until a process that has ended by itself is started again

Note = Callable[[str], None]


class Publishing:
    """Keeps the publishing process of one request alive until `end`. `note` shows a line to the operator; it is called
    at most once."""

    def __init__(self, order: PublishRequest, note: Note, again_s: float = _AGAIN_S) -> None:
        self._order, self._note, self._again_s = order, note, again_s
        self._name = type(order.tracker).__name__.lower()
        self._ending = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._complained = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {self._name}", daemon=True)
        self._thread.start()

    def ask_to_end(self) -> None:
        """Ask the process to publish the remaining records and end."""
        self._ending.set()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds for the process to end, then kill it with all its children."""
        self._thread.join(patience_s)
        if self._process is not None and self._process.poll() is None:
            self._complain("it did not end in time; the next start publishes what is missing")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                code = self._live()
            except OSError as error:
                self._complain(str(error))
                return
            if code == HOPELESS:
                return
            if code != 0:
                self._complain(f"its process ended with code {code}")
            self._ending.wait(self._again_s)

    def _live(self) -> int:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.observe.trackers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a signal to the driver's group must not end it: it still has records to publish
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._order.model_dump_json() + "\n")
        process.stdin.flush()
        if self._ending.is_set():
            self.ask_to_end()
        for line in process.stdout:
            self._complain(line.strip())
        return process.wait()

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            self._note(f"{self._name}: not published: {reason}; the run continues")


@contextmanager
def tracking(store: Store, recipe: Recipe, note: Note) -> Iterator[None]:
    """Publish the run in `store` to the trackers that its recipe names, until the context ends."""
    publishing = [Publishing(order, note) for order in orders(store, recipe)]
    try:
        yield
    finally:
        for one in publishing:
            one.ask_to_end()
        deadline = time.monotonic() + LAST_WORDS_S
        for one in publishing:
            one.end(max(0.0, deadline - time.monotonic()))


def orders(store: Store, recipe: Recipe, poll_s: float = _POLL_S) -> list[PublishRequest]:
    """Return a request for each tracker that the recipe names."""
    trackers: list[Wandb | Mlflow | None] = [recipe.logging.wandb, recipe.logging.mlflow]
    return [
        PublishRequest(
            uri=store.uri,
            name=recipe.name,
            recipe=flatten(recipe.to_data()),
            tracker=tracker,
            folder=_folder(store),
            poll_s=poll_s,
        )
        for tracker in trackers
        if tracker is not None
    ]


def _folder(store: Store) -> str | None:
    """Return the folder for files of a client: that of a local run, unless WANDB_DIR names one; else None."""
    return str(store.root) if isinstance(store, LocalStore) and "WANDB_DIR" not in os.environ else None
