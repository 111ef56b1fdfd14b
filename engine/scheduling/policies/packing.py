"""Which whole prompts make up a step, and whether they are padded to one length.

A step of whole prompts is a bin of `budget` tokens (Prepacking section 3.1). Each function takes the lengths of the
prompts that could be computed now, in the order of their admission, and returns the indices of the prompts of the step:
at least one, and more tokens than the budget only where a single prompt is longer.

"prepacked" uses the bin-packing library of the paper's authors: the longest prompts first, each into a bin that has
room. Only the first bin is computed; the other prompts are packed again for the next step, with newly admitted ones.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

import numpy as np

from engine.config import Packing
from engine.kernels import cdiv
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import Sequence
from engine.scheduling.token_batch import ChunkGroup, Chunks

if TYPE_CHECKING:
    from engine.scheduling.step import Step


def pack_in_turn(lengths: Sequences[int], budget: int) -> list[int]:
    """Prompts in order, up to the first that does not fit."""
    taken: list[int] = []
    for index, length in enumerate(lengths):
        if taken and length > budget:
            break
        taken.append(index)
        budget -= length
    return taken


def pack_decreasing(lengths: Sequences[int], budget: int) -> list[int]:
    """The longest prompt and the prompts packed with it."""
    from binpacking.to_constant_volume import to_constant_volume  # imported only when needed

    return [*to_constant_volume(dict(enumerate(lengths)), budget)[0]]


def pack_padded(lengths: Sequences[int], budget: int) -> list[int]:
    """Prompts in order, as many as fit when all are padded to the longest of them."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and (count + 1) * longest > budget:
            return list(range(count))
    return list(range(len(lengths)))


def pack_length_ordered(lengths: Sequences[int], budget: int) -> list[int]:
    """As `pack_padded`, the longest prompts first, so that little padding is needed."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[place] for place in pack_padded([lengths[index] for index in order], budget)]


PACKINGS: dict[Packing, Callable[[Sequences[int], int], list[int]]] = {
    "ragged": pack_in_turn,
    "prepacked": pack_decreasing,
    "length_ordered": pack_length_ordered,
    "padded": pack_padded,
}

PADDED_PACKINGS: frozenset[Packing] = frozenset(["length_ordered", "padded"])
"""Policies that pad the prompts of a step to the longest of them; the padding is computed."""


def add_packed(step: "Step", prompts: Sequences[Sequence | PrefixNode], packing: Packing, pad_block_id: int) -> None:
    """Adds the whole prompts that `packing` selects: all remaining tokens of a request's own part, or of a prefix.

    Args:
        prompts: those that could be computed now, in the order of their admission.
        pad_block_id: KV block that padding is written to.
    """
    lengths = [prompt.num_uncomputed for prompt in prompts]
    taken = PACKINGS[packing](lengths, step.room)
    for index in taken:
        prompt = prompts[index]
        if isinstance(prompt, Sequence):
            step.suffixes.append((prompt, lengths[index]))
        else:
            step.prefixes[prompt] = lengths[index]
        step.room = max(0, step.room - lengths[index])
    if packing in PADDED_PACKINGS and taken:
        step.padded_length = max(lengths[index] for index in taken)
        step.num_padding_tokens = sum(step.padded_length - lengths[index] for index in taken)
        step.pad_block_id = pad_block_id


def pad_chunks(step: "Step", chunks: Chunks, groups: Sequences[ChunkGroup]) -> tuple[Chunks, list[ChunkGroup]]:
    """Adds a chunk of padding after each chunk that is shorter than the step's padded length. No row attends to
    padding. Its KV goes into free slots of the prompt's last block, then into the step's pad block.

    Args:
        chunks, groups: of the step's prompts.
    """
    padded, counts = Chunks(), [0] * len(groups)
    entries = zip(*(getattr(chunks, name) for name in Chunks.__slots__), strict=True)
    owners = (index for index, group in enumerate(groups) for _ in range(group.num_chunks))
    for owner, (token_ids, position, num_earlier, block_table, num_output_rows) in zip(owners, entries, strict=True):
        padded.add(token_ids, position, num_earlier, block_table, num_output_rows)
        num_rows = max(0, step.padded_length - len(token_ids))
        counts[owner] += 1 + (num_rows > 0)
        if num_rows:
            end = num_earlier + len(token_ids)
            num_own = cdiv(end, step.block_size)
            pads = np.full(cdiv(end + num_rows, step.block_size) - num_own, step.pad_block_id, dtype=np.int32)
            own_and_pads = np.concatenate([block_table[:num_own], pads])
            padded.add(np.zeros(num_rows, dtype=np.int32), 0, end, own_and_pads, 0)
    return padded, [group._replace(num_chunks=count) for group, count in zip(groups, counts, strict=True)]
