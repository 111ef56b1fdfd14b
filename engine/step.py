"""What one step computes, and its layout as a token batch."""

from dataclasses import dataclass, field

import numpy as np

from engine.prefix_node import PrefixNode
from engine.sequence import Sequence
from engine.token_batch import Chunk, ChunkGroup, TokenBatch, build_token_batch


@dataclass(slots=True, kw_only=True)
class Step:
    """Work of one step: (sequence, number of its next tokens), (prefix node, number of its next tokens).

    `room` is how many tokens may still be added.
    """

    room: int
    decodes: list[tuple[Sequence, int]] = field(default_factory=list)
    suffixes: list[tuple[Sequence, int]] = field(default_factory=list)
    prefixes: dict[PrefixNode, int] = field(default_factory=dict)
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.suffixes or self.prefixes)

    def lay_out(self, block_size: int) -> tuple[TokenBatch, list[tuple[Sequence, int]]]:
        """The step's rows, group after group; sequences that share nothing and prefixes come last.

        Returns:
            the token batch, and whose its output rows are: (sequence, number of rows), in row order.
        """
        by_node: dict[PrefixNode | None, list[tuple[Sequence, Chunk]]] = {}
        for sequence, num_tokens in (*self.decodes, *self.suffixes):
            by_node.setdefault(sequence.node, []).append((sequence, _sequence_chunk(sequence, num_tokens)))
        unshared = by_node.pop(None, [])
        groups = [
            ChunkGroup(
                prefix_block_ids=node.chain_block_ids,
                prefix_length=node.end,
                chunks=[chunk for _, chunk in members],
            )
            for node, members in by_node.items()
            if node is not None
        ]
        own_chunks = [chunk for _, chunk in unshared]
        own_chunks += [_prefix_chunk(node, num_tokens) for node, num_tokens in self.prefixes.items()]
        if own_chunks:
            groups.append(ChunkGroup(prefix_block_ids=_NO_BLOCKS, prefix_length=0, chunks=own_chunks))
        outputs = [
            (sequence, chunk.output_rows)
            for members in (*by_node.values(), unshared)
            for sequence, chunk in members
            if chunk.output_rows
        ]
        return build_token_batch(groups, block_size), outputs


_NO_BLOCKS = np.empty(0, dtype=np.int32)


def _sequence_chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    token_ids = sequence.next_tokens[:num_tokens]
    if sequence.label >= 0 and sequence.num_computed >= sequence.num_suffix:
        output_rows = num_tokens  # each row of a label predicts its next token
    else:
        output_rows = int(num_tokens == len(sequence.next_tokens))
    return Chunk(
        token_ids=token_ids,
        position=sequence.prefix_length + sequence.num_computed,
        num_earlier=sequence.num_computed,
        block_ids=sequence.block_ids,
        output_rows=output_rows,
    )


def _prefix_chunk(node: PrefixNode, num_tokens: int) -> Chunk:
    """Rows of a prefix attend to the whole chain above them as their own KV."""
    position = node.start + node.num_computed
    return Chunk(
        token_ids=node.token_ids[node.num_computed : node.num_computed + num_tokens],
        position=position,
        num_earlier=position,
        block_ids=node.chain_block_ids,
        output_rows=0,
    )
