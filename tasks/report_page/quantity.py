"""Formats quantities for people; unknown ones are a dash."""

UNKNOWN = "\N{EM DASH}"


def count(value: float | None) -> str:
    """A count such as 1,234,567; below 100, a mean that is no whole number keeps one decimal."""
    if value is None:
        return UNKNOWN
    return f"{value:,.1f}" if value < 100 and value != round(value) else f"{value:,.0f}"


def short(value: float) -> str:
    """A short number such as 1.5M, for the ticks of an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"


def seconds(value: float | None) -> str:
    """A duration such as 412 ms, 12.3 s, 4 min 05 s, or 3 h 12 min."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def percent(value: float | None) -> str:
    """A share such as 71.9% for 0.719."""
    return UNKNOWN if value is None else f"{value:.1%}"


def between(first: int, last: int) -> str:
    """A range such as "7", or "7 to 12"."""
    return count(first) if first == last else f"{count(first)} to {count(last)}"
