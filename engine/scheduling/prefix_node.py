"""A shared prefix and its KV while requests need it: a chain of nodes from the prompt's first token on."""

from typing import TYPE_CHECKING, Optional

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kv.block_pool import NO_BLOCKS, BlockPool

if TYPE_CHECKING:
    from engine.scheduling.step import Step


class PrefixNode:
    """Prompt tokens, `token_ids`, from `start` on below `parent`; start is a multiple of the block size, so nodes never
    share a block.

    A group's prefix is the chain from a root to its node. Lifetime is explicit (BatchLLM section 4.3.1): a node's
    blocks are freed when its last user finishes, and evicted earlier only where no request with KV uses them.

    Attributes:
        num_computed: tokens whose KV is written; 0 while no blocks are held.
        num_unfinished: child nodes and requests that still need this node, running or not.
        is_charged: whether its tokens have been counted as computed for some request.
    """

    __slots__ = (
        *("block_ids", "chain_block_ids", "end", "is_charged", "num_computed", "num_unfinished", "parent", "start"),
        "token_ids",
    )

    def __init__(self, *, parent: Optional["PrefixNode"], token_ids: npt.NDArray[np.int32], start: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.start = start
        self.end = start + len(token_ids)
        self.block_ids = NO_BLOCKS
        self.chain_block_ids = NO_BLOCKS
        self.num_computed = 0
        self.num_unfinished = 0
        self.is_charged = False
        if parent is not None:
            parent.num_unfinished += 1

    @property
    def holds_blocks(self) -> bool:
        return len(self.block_ids) > 0

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether the whole chain is computed: a node with blocks keeps its parents resident."""
        return all(node.num_uncomputed == 0 for node in self.chain())

    def announce(self) -> None:
        """Called once before the first step; of all nodes in the order in which groups need them."""

    def chain(self) -> list["PrefixNode"]:
        """From the root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def num_missing_blocks(self, pool: BlockPool) -> int:
        """Blocks that `acquire` would allocate in all block tables."""
        missing = (cdiv(len(node.token_ids), pool.block_size) for node in self.chain() if not node.holds_blocks)
        return sum(missing) * pool.num_tables

    def next_to_compute(self) -> "PrefixNode":
        """The first node of a chain that is not complete."""
        return next(node for node in self.chain() if node.num_uncomputed)

    def add_to(self, step: "Step") -> None:
        """Adds the chain's next tokens to a step, from the top; a node starts after the whole node above it."""
        for node in self.chain():
            num_left = node.num_uncomputed
            if num_left and node not in step.prefixes and step.room:
                step.prefixes[node] = min(num_left, step.room)
                step.room -= step.prefixes[node]
            if step.prefixes.get(node, 0) < num_left:
                return

    def is_complete_after(self, step: "Step") -> bool:
        """Whether the whole chain is computed once the step is."""
        return all(step.prefixes.get(node, 0) == node.num_uncomputed for node in self.chain())

    def acquire(self, pool: BlockPool) -> int:
        """Allocates blocks for every node of the chain that has none; returns the number of tokens they are for."""
        num_tokens = 0
        for node in self.chain():
            if not node.holds_blocks:
                num_tokens += len(node.token_ids)
                node.block_ids = node.chain_block_ids = pool.allocate_table(cdiv(len(node.token_ids), pool.block_size))
                pool.num_prefix_blocks += node.block_ids.size
                if node.parent is not None:
                    node.chain_block_ids = np.concatenate([node.parent.chain_block_ids, node.block_ids])
        return num_tokens

    def release(self, pool: BlockPool) -> None:
        """Frees this node's blocks, which no request or longer prefix still needs; they can be computed again."""
        if not self.holds_blocks:
            return
        pool.free(self.block_ids)
        pool.num_prefix_blocks -= int(np.count_nonzero(self.block_ids >= 0))
        self.block_ids = self.chain_block_ids = NO_BLOCKS
        self.num_computed = 0

    def finish_user(self, pool: BlockPool) -> None:
        """Counts one user as finished; the last one frees the node, and so on upwards."""
        for node in reversed(self.chain()):
            node.num_unfinished -= 1
            if node.num_unfinished:
                return
            node.release(pool)

    def charge(self) -> int:
        """Marks the chain's tokens as charged; returns how many no request had been charged with."""
        uncharged = [node for node in self.chain() if not node.is_charged]
        for node in uncharged:
            node.is_charged = True
        return sum(len(node.token_ids) for node in uncharged)
