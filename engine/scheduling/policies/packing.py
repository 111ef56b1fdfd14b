"""Which whole prompts make up a step, and whether they are padded to one length.

A step of whole prompts is a bin of `budget` tokens (Prepacking section 3.1). Each function takes the lengths of the
prompts that could be computed now, in the order of their admission, and returns the indices of the prompts of the step:
at least one, and more tokens than the budget only where a single prompt is longer.

"prepacked" uses the bin-packing library of the paper's authors: the longest prompts first, each into a bin that has
room. Only the first bin is computed; the other prompts are packed again for the next step, with newly admitted ones.
"""

from collections.abc import Callable, Sequence

from engine.config import Packing


def pack_in_turn(lengths: Sequence[int], budget: int) -> list[int]:
    """Prompts in order, up to the first that does not fit."""
    taken: list[int] = []
    for index, length in enumerate(lengths):
        if taken and length > budget:
            break
        taken.append(index)
        budget -= length
    return taken


def pack_decreasing(lengths: Sequence[int], budget: int) -> list[int]:
    """The longest prompt and the prompts packed with it."""
    from binpacking.to_constant_volume import to_constant_volume  # imported only when needed

    return [*to_constant_volume(dict(enumerate(lengths)), budget)[0]]


def pack_padded(lengths: Sequence[int], budget: int) -> list[int]:
    """Prompts in order, as many as fit when all are padded to the longest of them."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and (count + 1) * longest > budget:
            return list(range(count))
    return list(range(len(lengths)))


def pack_length_ordered(lengths: Sequence[int], budget: int) -> list[int]:
    """As `pack_padded`, the longest prompts first, so that little padding is needed."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[place] for place in pack_padded([lengths[index] for index in order], budget)]


PACKINGS: dict[Packing, Callable[[Sequence[int], int], list[int]]] = {
    "ragged": pack_in_turn,
    "prepacked": pack_decreasing,
    "length_ordered": pack_length_ordered,
    "padded": pack_padded,
}

PADDED_PACKINGS: frozenset[Packing] = frozenset(["length_ordered", "padded"])
"""Policies that pad the prompts of a step to the longest of them; the padding is computed."""
