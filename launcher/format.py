"""Numbers as people read them."""


def human_count(value: float) -> str:
    """Return a count as text: 1234567 -> "1.2M"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


def human_bytes(value: float) -> str:
    """Return a size as text: 1234567 -> "1.2 MiB"."""
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def hours_or_days(seconds: float) -> str:
    """Return seconds as text: 32040 -> "8.9 hours"; from two days on 200000 -> "2.31 days"."""
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.2f} days"


def human_duration(seconds: float) -> str:
    """Return seconds as text: 90061 -> "1d 1h"; 61 -> "1m 01s"; 5.25 -> "5.2s"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {whole % 60:02d}s"
    return f"{seconds:.1f}s"
