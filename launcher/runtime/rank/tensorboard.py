"""TensorBoard event files of a run on a local disk, beside its JSONL segments, which remain the authoritative
records."""

import io
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.runtime.run.metrics import figures
from launcher.runtime.run.recording import Recorder

_log = logging.getLogger(__name__)

_RETRY_S = 60.0  # time until the next try after a failure: a full disk stays full for a while
_CLOSE_S = 5.0


class TensorBoardFiles:
    """A writer of event files below `folder`, on a separate thread. It purges events of earlier files from `first_step`
    on, because those steps are repeated. A slow disk delays only the curves; a disk that fails leaves a gap in them,
    and `note` tells the operator.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._purged_from = folder, first_step
        self._note, self._clock = note, clock
        self._file: io.FileIO | None = None
        self._not_before = float("-inf")
        self._recorder = Recorder(note, what="TensorBoard's figures")

    def step(self, record: Mapping[str, Any]) -> None:
        self._submit(record)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._submit(record)

    def close(self, patience_s: float = _CLOSE_S) -> bool:
        """Write the remaining events, in at most `patience_s` seconds. Return whether all are written."""
        self._recorder.submit(self._close)
        return self._recorder.close(patience_s)

    def _submit(self, record: Mapping[str, Any]) -> None:
        now, named, step = time.time(), figures(record), record["step"]
        self._recorder.submit(lambda: self._write(named, step, now))

    def _write(self, named: Mapping[str, float], step: int, now: float) -> None:
        if self._clock() < self._not_before:
            return
        try:
            if self._file is None:
                self._file = _new_file(self._folder, self._purged_from, now)
            _append(self._file, _scalars(named, step, now))
        except OSError as error:
            if self._not_before == float("-inf"):
                self._note(
                    f"TensorBoard's files in {self._folder} cannot be written: {error}; training continues"
                )
            _log.warning("TensorBoard's files: %s", error)
            self._not_before = self._clock() + _RETRY_S
            self._purged_from = step + 1  # the next file purges nothing: no step is repeated
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _new_file(folder: Path, purged_from: int, now: float) -> io.FileIO:
    """Return a new event file that begins with a header. The header purges the events of older files from step
    `purged_from` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only local runs want it

    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
    file = io.FileIO(folder / name, "ab")
    start = SessionLog(status=SessionLog.START)
    head = (
        Event(wall_time=now, file_version="brain.Event:2"),
        Event(wall_time=now, step=purged_from, session_log=start),
    )
    _append(file, head)
    return file


def _scalars(named: Mapping[str, float], step: int, now: float) -> tuple[Any, ...]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in named.items()]
    return (Event(wall_time=now, step=step, summary=Summary(value=values)),)


def _append(file: io.FileIO, events: tuple[Any, ...]) -> None:
    """Append whole records. Raises OSError if that is not possible: readers stop at half a record."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    for event in events:
        RecordWriter(buffer).write(event.SerializeToString())
    rest = buffer.getbuffer()
    while rest:
        rest = rest[file.write(rest) or 0 :]
