"""The windows that a reader has announced it will read. They are requested one after another as memory allows."""

from collections.abc import Callable, Iterable, Iterator

from data_service.stream.stream import SlabLayout

EpochWindow = tuple[int, int]
"""(epoch, window)."""

WindowSpan = tuple[EpochWindow, int, int]
"""(window, first, last): samples `first` to `last` of a window, counted from its first sample."""


class AnnouncedWindow:
    """The samples of one window that will be read, and the slabs in which they lie.

    Attributes:
        layout: layout of the window.
        slabs: numbers of the slabs, in the order in which they are needed.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.slabs: dict[int, None] = {}
        self._ranges: list[tuple[int, int]] = []

    def add_samples(self, first: int, last: int) -> None:
        self._ranges.append((first, last))
        self.slabs.update(dict.fromkeys(self.layout.slabs_with_samples(first, last)))

    def replace_layout(self, layout: SlabLayout) -> None:
        """Replace the expected layout by `layout`, with which the window has been built."""
        if layout != self.layout:
            self.layout, self.slabs = layout, {}
            for first, last in self._ranges:
                self.slabs.update(dict.fromkeys(layout.slabs_with_samples(first, last)))


class AnnouncedWindows:
    """The windows that will be read, in order, of which at most `most` are current.

    Args:
        spans: samples that will be read, in order. They may reach to the end of a run.
        most: largest number of current windows.
        layout: function that returns the layout of a window.

    Attributes:
        windows: current windows: those to fetch now or to hold.
    """

    def __init__(self, spans: Iterable[WindowSpan], most: int, layout: Callable[[EpochWindow], SlabLayout]) -> None:
        self.windows: dict[EpochWindow, AnnouncedWindow] = {}
        self._spans: Iterator[WindowSpan] = iter(spans)
        self._next = next(self._spans, None)
        self._most, self._layout = most, layout

    def advance_past(self, current_windows: set[EpochWindow]) -> None:
        """Drop the windows before `current_windows`, the windows that are read now, and make further ones current."""
        if current_windows & self.windows.keys():
            while (first := next(iter(self.windows))) not in current_windows:
                del self.windows[first]
        while self._next is not None:
            window, first_row, last_row = self._next
            if window not in self.windows:
                if len(self.windows) >= self._most:
                    return
                self.windows[window] = AnnouncedWindow(self._layout(window))
            self.windows[window].add_samples(first_row, last_row)
            self._next = next(self._spans, None)
