"""Figures and tables in Markdown."""

from collections.abc import Sequence

from .figures import Seen

_HEIGHTS = "▁▂▃▄▅▆▇█"


def figure(seen: Seen, form: str, scale: float = 1.0) -> str:
    """`63.5 (62.9 to 64.0)`; of one seed the figure alone, of none a dash."""
    if not seen:
        return "-"
    mean, low, high = (form.format(scale * value) for value in (seen.mean, seen.low, seen.high))
    return mean if seen.n == 1 else f"{mean} ({low} to {high})"


def curve(seen: Sequence[Seen]) -> str:
    """Means as a line of blocks, from the row's lowest to its highest; a point for what there is."""
    means = [one.mean for one in seen if one]
    if not means or min(means) == max(means):
        return ""
    steps = (len(_HEIGHTS) - 1) / (max(means) - min(means))
    return "".join(_HEIGHTS[round((one.mean - min(means)) * steps)] if one else "." for one in seen)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of words on the left, of figures on the right."""
    sides = ["---" if index == 0 else "--:" for index in range(len(heads))]
    lines = [heads, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
