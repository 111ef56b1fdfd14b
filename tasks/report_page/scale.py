"""A linear scale: values of an axis to pixels, and round values to mark on it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from `low` to `high` lie between the pixels `start` and `end`; `end` may be the smaller one.

    Raises `ValueError` where there is nothing between low and high.
    """

    low: float
    high: float
    start: float
    end: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"a scale needs low < high, got {self.low} and {self.high}")

    def at(self, value: float) -> float:
        """The pixel of a value; beyond the ends it goes on."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """At most so many round values in the scale: multiples of 1, 2 or 5 times a power of ten."""
        raw = (self.high - self.low) / (most - 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]
