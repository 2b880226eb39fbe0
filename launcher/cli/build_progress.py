"""Shows a corpus build as it goes: a bar on a terminal, a line a stage anywhere else."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from data_service.ingest.pool import Progress as BuildProgress
from launcher.format import human_bytes


class BuildWatch:
    """Give `update` to `build_corpus`; close when it has returned."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def update(self, progress: BuildProgress) -> None:
        size = f"{human_bytes(progress.bytes_done)} of {human_bytes(progress.bytes_total)}"
        if self._console.is_terminal:
            self._draw(progress, size)
        elif progress.done == progress.total or progress.stage != self._stage:
            tasks = f"{progress.done}/{progress.total} tasks"
            self._console.print(f"{progress.stage}: {tasks}, {size}", highlight=False)
        self._stage = progress.stage

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, progress: BuildProgress, size: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(30), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(progress.stage)
            self._bar.start()
        elif progress.stage != self._stage:
            self._task = self._bar.add_task(progress.stage)
        description = f"{progress.stage:<11} {size}"
        self._bar.update(self._task, completed=progress.done, total=progress.total, description=description)
