"""The order of what is measured side by side."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def in_turn(items: Iterable[T], round_number: int) -> list[T]:
    """The items; each round begins with another one, since what ran before may slow down or speed up the next."""
    order = list(items)
    first = round_number % len(order)
    return order[first:] + order[:first]
