"""TensorBoard's event files of a run on a local disk, written by TensorBoard's own writer."""

import time
from collections.abc import Sequence
from pathlib import Path

from launcher.observe.sinks.sink import PublishRequest, Sink, StepFigures


class TensorBoardFiles(Sink):
    """A sink that writes a new event file in the run's `tensorboard/`. If the run goes back, the repeated steps are
    purged from older files."""

    def __init__(self, request: PublishRequest, *_: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        assert request.folder is not None
        self._writer = EventFileWriter(str(Path(request.folder) / "tensorboard"))
        self._event, self._session, self._summary = Event, SessionLog, Summary

    def log(self, rows: Sequence[StepFigures], superseded_from: int | None) -> None:
        now = time.time()
        if superseded_from is not None:
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(wall_time=now, step=superseded_from, session_log=start))
        for row in rows:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.figures.items()]
            self._writer.add_event(self._event(wall_time=now, step=row.step, summary=self._summary(value=values)))
        self._writer.flush()
