"""Parses the end of a night: a time of day, or a budget of time."""

import re
from datetime import datetime, timedelta

from engine.errors import ConfigError

RESERVE_SHARE = 0.02
"""Share of the night that is reserved at its end for writing the last answers and the report."""
LEAST_RESERVE_SECONDS = 1.0

LONGEST_SECONDS = 1e9
"""Longest budget, about thirty years: its end must be a valid date."""

_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}


def find_deadline(until: str, budget: str, now: datetime) -> datetime | None:
    """The latest time at which a step of the engine may begin; None for no limit. Raises `ConfigError` if `until` or
    `budget` cannot be read, or the time has passed.

    Args:
        until: a time of day such as "06:00", today or tomorrow, whichever comes next; or a date and a time. Without a
            time zone it is local time, as this machine's clock will show it then. Empty for none.
        budget: a length of time such as "90min", "1h 30min" or "45s". Empty for none.
        now: the beginning of the night, with a time zone.
    """
    ends = [parse_until(until, now)] if until else []
    ends += [now + timedelta(seconds=parse_budget(budget))] if budget else []
    if not ends:
        return None
    end = min(ends)
    reserve = max(LEAST_RESERVE_SECONDS, RESERVE_SHARE * (end - now).total_seconds())
    return end - timedelta(seconds=reserve)


def parse_until(text: str, now: datetime) -> datetime:
    """The next time after `now` that the text names; see `find_deadline`."""
    if match := re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", text.strip()):
        hour, minute, second = (int(part or 0) for part in match.groups())
        today = now.astimezone().replace(tzinfo=None)
        try:
            named = today.replace(hour=hour, minute=minute, second=second, microsecond=0)
        except ValueError as error:
            raise ConfigError(f"until must be a time of day such as 06:00, got {text!r}") from error
        days = (named, named + timedelta(days=1))
        # A clock that is set back shows some times twice: fold 0 first, then fold 1.
        times = (day.replace(fold=fold).astimezone() for day in days for fold in (0, 1))
        return next(time for time in times if time > now)
    try:
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo else found.astimezone()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"until must be a time of day such as 06:00, or a date and a time, got {text!r}") from error
    if found <= now:
        raise ConfigError(f"until {text} has passed")
    return found


def parse_budget(text: str) -> float:
    """Seconds of a length of time such as "1h 30min"; `ConfigError` for any other text, 0, or `LONGEST_SECONDS`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(h|min|s)(?![a-z])", text)
    rest = re.sub(r"\d+(?:\.\d+)?\s*(?:h|min|s)(?![a-z])", "", text).strip()
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if rest or not 0 < seconds < LONGEST_SECONDS:
        raise ConfigError(f"budget must be a length of time such as 90min or 1h 30min, got {text!r}")
    return seconds
