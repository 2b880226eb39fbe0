"""The windows that a reader has announced it will read, taken up one after another as far as memory allows."""

from collections.abc import Callable, Iterable, Iterator

from data_service.stream.stream import SlabLayout

EpochWindow = tuple[int, int]
"""(epoch, window)."""

Span = tuple[EpochWindow, int, int]
"""Samples `first` to `last` of a window, counted within it."""


class AnnouncedWindow:
    """The samples of one window that will be read, and the slabs in which they lie.

    Attributes:
        layout: the window's.
        slabs: in the order in which they are needed.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.slabs: dict[int, None] = {}
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        self._ranges.append((first, last))
        self.slabs.update(dict.fromkeys(self.layout.slabs_of(first, last)))

    def lay(self, layout: SlabLayout) -> None:
        """Use the layout with which the window has been built, if it is not the expected one."""
        if layout != self.layout:
            self.layout, self.slabs = layout, {}
            for first, last in self._ranges:
                self.slabs.update(dict.fromkeys(layout.slabs_of(first, last)))


class AnnouncedWindows:
    """Windows that will be read, in order, `most` of them at a time.

    Args:
        spans: what will be read, in order; may go on to the end of a run.
        most: windows to be taken up at a time.
        layout: of a window.

    Attributes:
        windows: those taken up.
    """

    def __init__(self, spans: Iterable[Span], most: int, layout: Callable[[EpochWindow], SlabLayout]) -> None:
        self.windows: dict[EpochWindow, AnnouncedWindow] = {}
        self._spans: Iterator[Span] = iter(spans)
        self._next = next(self._spans, None)
        self._most, self._layout = most, layout

    def move_on(self, reading: set[EpochWindow]) -> None:
        """Drop the windows before those that are read now, and take up more in their place."""
        if reading & self.windows.keys():
            while (first := next(iter(self.windows))) not in reading:
                del self.windows[first]
        while self._next is not None:
            window, first_row, last_row = self._next
            if window not in self.windows:
                if len(self.windows) >= self._most:
                    return
                self.windows[window] = AnnouncedWindow(self._layout(window))
            self.windows[window].add(first_row, last_row)
            self._next = next(self._spans, None)
