"""Starts, and restarts if needed, the process that publishes a run to its sinks. It may hang, crash or fail to start.

The command waits for the process only at its end, for at most `END_TIMEOUT_S`. The next start publishes records that
are still missing then.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from checkpoints.attempt import newest_attempt_number
from data_service.store.base import Store
from data_service.store.local import LocalStore
from launcher.observe.sinks.publish import NO_USABLE_SINK_CODE
from launcher.observe.sinks.sink import PublishRequest
from launcher.runtime.recipe.identity import flatten
from launcher.runtime.recipe.schema import Recipe

END_TIMEOUT_S = 10.0
"""Seconds for publishing the remaining records when the command ends."""
_STORE_POLL_INTERVAL_S = 5.0  # seconds between two reads of the run's store
_RESTART_DELAY_S = 60.0  # seconds until a process that has ended by itself is started again

Note = Callable[[str], None]  # shows a line to the operator


class SinkProcess:
    """Keeps the process that serves a request's sinks running until `end_process`.

    `note` shows a line to the operator; it is called at most once for each sink.
    """

    def __init__(self, request: PublishRequest, note: Note, restart_s: float = _RESTART_DELAY_S) -> None:
        self._request, self._note, self._restart_s = request, note, restart_s
        self._ending = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._finished: set[str] = set()  # sinks that have published everything
        self._noted: set[str] = set()  # sinks with a problem that was shown
        self._thread = threading.Thread(target=self._keep_process_running, name="sinks", daemon=True)
        self._thread.start()

    def request_end(self) -> None:
        """Ask the process to publish the remaining records and end."""
        self._ending.set()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end_process(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds for the process to end, then kill it with all its children."""
        self._thread.join(patience_s)
        if self._process is not None and self._process.poll() is None:
            self._warn_once("publishing took too long; the next start publishes the rest", *self._unfinished_sinks)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def _unfinished_sinks(self) -> list[str]:
        return [name for name in self._request.sinks if name not in self._finished]

    def _keep_process_running(self) -> None:
        while not self._ending.is_set():
            try:
                code = self._run_process()
            except OSError as error:
                self._warn_once(str(error), *self._request.sinks)
                return
            if code == NO_USABLE_SINK_CODE:
                return
            if code != 0:
                self._warn_once(f"the publishing process ended with code {code}", *self._unfinished_sinks)
            later = {"began": time.time(), "attempts": sys.maxsize}  # a restarted process must not repeat events
            self._request = self._request.model_copy(update=later)
            self._ending.wait(self._restart_s)

    def _run_process(self) -> int:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.observe.sinks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # it still has records to publish after a signal to the driver's process group
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._request.model_dump_json() + "\n")
        process.stdin.flush()
        if self._ending.is_set():
            self.request_end()
        for line in process.stdout:
            report = json.loads(line)
            if report["problem"] is None:
                self._finished.add(report["sink"])
            else:
                self._warn_once(report["problem"].replace("\n", " "), report["sink"])
        return process.wait()

    def _warn_once(self, reason: str, *sinks: str) -> None:
        new = [name for name in sinks if name not in self._noted]
        self._noted.update(new)
        if new:
            self._note(f"{', '.join(new)}: not published: {reason}; the run continues")


@contextmanager
def publish_run(store: Store, recipe: Recipe, note: Note) -> Iterator[None]:
    """Publish the run in `store` to the sinks that its recipe names, until the context ends. Raises StoreError."""
    request = make_publish_request(store, recipe)
    if not request.sinks:
        yield
        return
    process = SinkProcess(request, note)
    try:
        yield
    finally:
        process.request_end()
        process.end_process(END_TIMEOUT_S)


def make_publish_request(store: Store, recipe: Recipe, poll_s: float = _STORE_POLL_INTERVAL_S) -> PublishRequest:
    """Return the request for all sinks that the recipe names. Raises StoreError."""
    logging, hook = recipe.logging, recipe.events.webhook_env
    folder = str(store.root) if isinstance(store, LocalStore) else None
    return PublishRequest(
        uri=store.uri,
        name=recipe.name,
        recipe=flatten(recipe.to_data()),
        tensorboard=logging.tensorboard and folder is not None,
        wandb=logging.wandb,
        mlflow=logging.mlflow,
        webhook_env=hook,
        folder=folder,
        poll_s=poll_s,
        began=time.time(),
        attempts=newest_attempt_number(store) if hook else 0,
    )
