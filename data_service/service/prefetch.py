"""The windows of samples (`feed.py`) that a reader will read. They are requested in order, as memory allows."""

from collections.abc import Callable, Iterable, Iterator

from data_service.stream.stream import SlabLayout

EpochWindow = tuple[int, int]
"""(epoch, number of a window in the epoch)."""

WindowSpan = tuple[EpochWindow, int, int]
"""(window, first, last): samples `first` to `last` (exclusive) of a window, counted from its first sample."""


class AnnouncedWindow:
    """The samples of one window that will be read, and the slabs that contain them.

    Attributes:
        layout: slab layout of the window.
        slabs: numbers of the slabs (as keys), in the order in which they are needed.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.slabs: dict[int, None] = {}
        self._ranges: list[tuple[int, int]] = []

    def add_samples(self, first: int, last: int) -> None:
        self._ranges.append((first, last))
        self.slabs.update(dict.fromkeys(self.layout.slabs_with_samples(first, last)))

    def replace_layout(self, layout: SlabLayout) -> None:
        """Replace the expected layout by the layout of the window's build."""
        if layout != self.layout:
            self.layout, self.slabs = layout, {}
            for first, last in self._ranges:
                self.slabs.update(dict.fromkeys(layout.slabs_with_samples(first, last)))


class AnnouncedWindows:
    """The windows that will be read, in order, and a sliding range of at most `most` of them to fetch and hold.

    Args:
        spans: samples that will be read, in order. They may reach to the end of the training run.
        most: largest number of windows to fetch or hold at a time.
        layout: function that returns the slab layout of a window.

    Attributes:
        windows: the windows to fetch or hold now.
    """

    def __init__(self, spans: Iterable[WindowSpan], most: int, layout: Callable[[EpochWindow], SlabLayout]) -> None:
        self.windows: dict[EpochWindow, AnnouncedWindow] = {}
        self._spans: Iterator[WindowSpan] = iter(spans)
        self._next = next(self._spans, None)
        self._most, self._layout = most, layout

    def advance_past(self, current_windows: set[EpochWindow]) -> None:
        """Drop the windows before `current_windows`, which are read now, and add following windows up to `most`."""
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
