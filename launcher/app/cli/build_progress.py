"""Shows a corpus build as it goes: how far each stage is, and in a log a line at its beginning and end."""

from contextlib import ExitStack

from rich.console import Console

from data_service.ingest.pool import Progress as BuildProgress
from launcher.format import human_bytes
from launcher.progress import BYTES, Work, work


class BuildWatch:
    """Give `update` to `build_corpus`; close when it has returned."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._open = ExitStack()
        self._work: Work | None = None

    def update(self, progress: BuildProgress) -> None:
        if self._work is None or progress.stage != self._stage:
            self.close()
            self._work = self._open.enter_context(work(progress.stage, progress.bytes_total, BYTES))
            self._work.begin_at(progress.bytes_done)
        if not self._console.is_terminal and (
            progress.done == progress.total or progress.stage != self._stage
        ):
            size = f"{human_bytes(progress.bytes_done)} of {human_bytes(progress.bytes_total)}"
            tasks = f"{progress.done}/{progress.total} tasks"
            self._console.print(f"{progress.stage}: {tasks}, {size}", highlight=False)
        self._stage = progress.stage
        self._work.at(progress.bytes_done, progress.bytes_total)

    def close(self) -> None:
        self._open.close()
