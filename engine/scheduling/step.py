"""One step: the tokens that it computes, its layout as a token batch, and what it gives."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import NO_BLOCKS, BlockPool
from engine.scheduling.policies.packing import pad_chunks
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import Sequence
from engine.scheduling.token_batch import ChunkGroup, Chunks, TokenBatch, build_token_batch


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """Work of one step. The scheduler adds work, then calls `finalize`; nothing is added after that.

    Attributes:
        room: number of tokens that may still be added; 0 also where a single whole prompt exceeds the step.
        decodes, suffixes, prefixes: sequence or prefix node, and the number of its next tokens.
        padded_length: length that shorter prompts are padded to; 0 where none is padded.
        num_padding_tokens: rows of padding, which are computed and thrown away.
        pad_block_id: KV block that padding is written to; it belongs to no request.
        num_preempted: requests that lost their KV when the step was scheduled.
        killed: of these, the requests that end with an error.
        is_blocked: a decoding request needs memory of another one, which may not be taken before the steps in flight
            are committed.
        members: the sequences with work by their prefix node, in row order, each with the number of its next tokens.
        num_output_rows: rows that go through the output layer, numbered from 0 in row order.
        sampled: of these, the rows whose next token is sampled: (sequence, index of the own token that is predicted).
        scored_rows: the others, of sequences that generate nothing: (sequence, first row, number of rows, index of the
            own token that the first of these rows predicts; the others predict the tokens after it).
        num_opening_tokens: rows of prompts' last chunks that begin their answer (`Request.opening`).
        num_guessed_tokens, num_right_tokens: guesses among the decode rows; of these, those that were right.
        scored: sequences whose labels are all scored after this step.
        num_used_blocks: KV blocks in use once the step has its memory, those for tokens still expected included.
        num_prefix_blocks: of these, those of shared prefixes, idle ones included.
        num_cached_blocks: KV blocks in the LRU cache that no sequence holds.
        is_computed, is_advanced: whether its KV counts as written, and whether its answers have a token more.
        left_block_ids: KV blocks that no row of a later step sees; freed when the step is committed.
    """

    block_size: int
    room: int
    decodes: list[tuple[Sequence, int]] = field(default_factory=list)
    suffixes: list[tuple[Sequence, int]] = field(default_factory=list)
    prefixes: dict[PrefixNode, int] = field(default_factory=dict)
    padded_length: int = 0
    num_padding_tokens: int = 0
    pad_block_id: int = -1
    num_preempted: int = 0
    killed: list[Sequence] = field(default_factory=list)
    is_blocked: bool = False
    members: dict[PrefixNode | None, list[tuple[Sequence, int]]] = field(default_factory=dict)
    num_output_rows: int = 0
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)
    scored_rows: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    num_opening_tokens: int = 0
    num_guessed_tokens: int = 0
    num_right_tokens: int = 0
    scored: list[Sequence] = field(default_factory=list)
    num_used_blocks: int = 0
    num_prefix_blocks: int = 0
    num_cached_blocks: int = 0
    is_computed: bool = False
    is_advanced: bool = False
    left_block_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    _output_row_counts: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.suffixes or self.prefixes)

    def add(self, work: list[tuple[Sequence, int]], sequence: Sequence) -> None:
        """Adds a sequence's next tokens to `work` (the step's decodes or suffixes), as many as there is room for."""
        num_tokens = min(sequence.length - sequence.num_computed, self.room)
        if num_tokens:
            work.append((sequence, num_tokens))
            self.room -= num_tokens

    def finalize(self, pool: BlockPool) -> None:
        """Fixes the order of rows, and records the KV blocks in use. Rows come in this order: prefixes, each after
        those above it; sequences that share nothing; then group by group."""
        for sequence, count in self.suffixes:
            if sequence.num_output_tokens == len(sequence.request.opening):
                self.num_opening_tokens += max(0, min(count, sequence.num_computed + count - sequence.num_suffix))
        members = defaultdict[PrefixNode | None, list[tuple[Sequence, int]]](list, {None: []})
        for work in (*self.decodes, *self.suffixes):
            members[work[0].node].append(work)
        row, counts, sampled = 0, list[int](), self.sampled
        for sequence, count in chain.from_iterable(members.values()):
            # Output rows: the last known token and the guesses after it; of a label's tokens, every row.
            place = sequence.num_computed + count
            num_rows = place + 1 - sequence.length
            if sequence.label >= 0 and sequence.num_computed >= sequence.num_suffix:
                num_rows = count
            if num_rows <= 0:
                counts.append(0)
                continue
            counts.append(num_rows)
            place += 1 - num_rows
            if sequence.request.mode != "generate":
                self.scored_rows.append((sequence, row, num_rows, place))
            elif num_rows == 1:
                sampled.append((sequence, place))
            else:
                sampled.extend((sequence, place + index) for index in range(num_rows))
            row += num_rows
        self.members, self._output_row_counts = members, counts
        self.num_output_rows = row
        self.num_used_blocks = pool.num_used
        self.num_prefix_blocks = pool.num_prefix_blocks
        self.num_cached_blocks = pool.num_idle

    def build_batch(self) -> TokenBatch:
        """The rows as arrays, in the order of `finalize`."""
        chunks = Chunks()
        for node, count in self.prefixes.items():
            tokens = node.token_ids[node.num_computed : node.num_computed + count]
            position = node.start + node.num_computed
            # To a row of a prefix, the whole chain above it is own KV.
            chunks.add(tokens, position, num_earlier=position, block_table=node.chain_block_ids, num_output_rows=0)
        work = [*chain.from_iterable(self.members.values())]
        firsts = [sequence.num_computed for sequence, _ in work]
        chunks.token_ids += [s.own_token_ids[first : first + n] for (s, n), first in zip(work, firsts, strict=True)]
        chunks.first_positions += [sequence.prefix_length + sequence.num_computed for sequence, _ in work]
        chunks.num_earlier += firsts
        chunks.block_tables += [sequence.block_ids for sequence, _ in work]
        chunks.num_output_rows += self._output_row_counts
        groups = [
            ChunkGroup(NO_BLOCKS, 0, len(self.prefixes) + len(members))
            if node is None
            else ChunkGroup(node.chain_block_ids, node.end, len(members))
            for node, members in self.members.items()
        ]
        if self.padded_length:
            chunks, groups = pad_chunks(self, chunks, groups)
        return build_token_batch(chunks, [group for group in groups if group.num_chunks], self.block_size)
