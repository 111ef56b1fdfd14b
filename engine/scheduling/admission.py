"""Which requests may be given KV memory."""

from engine.config import EngineConfig
from engine.kernels import cdiv
from engine.kv.block_pool import BlockPool
from engine.kv.lru_block_pool import LruBlockPool
from engine.scheduling.block_cache import BlockCache
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.reserve import OutputReserve
from engine.scheduling.scheduled_group import ScheduledGroup
from engine.scheduling.sequence import Sequence


def make_pool(config: EngineConfig, num_blocks: int) -> BlockPool:
    """The block pool that a sharing policy needs."""
    return LruBlockPool(num_blocks) if config.sharing == "lru" else BlockPool(num_blocks)


class Admission:
    """Memory-centric admission (BatchLLM section 4.3.3): a request starts when its KV fits, with what it will need.

    Args:
        pool: KV blocks. With an `LruBlockPool`, requests begin with the blocks that are found in it.
        block_size: tokens in a block.
        reserve: how many tokens a request will need.
        swap: where preempted requests may have left their KV.
    """

    def __init__(self, pool: BlockPool, block_size: int, reserve: OutputReserve, swap: SwapSpace) -> None:
        self.pool = pool
        self._block_size = block_size
        self._reserve = reserve
        self._swap = swap
        self.cache = BlockCache(pool, block_size) if isinstance(pool, LruBlockPool) else None
        self._num_admitted = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether a request's own KV, as far as it is expected, can be held now."""
        return self._num_missing_blocks(sequence) <= self.pool.num_free

    def fits_group(self, group: ScheduledGroup) -> bool:
        """Whether a prefix can be held now with one request on it."""
        num_missing = self._num_missing_blocks(group.sequences[0])
        if group.node is not None:
            num_missing += group.node.num_missing_blocks(self._block_size)
        return num_missing <= self.pool.num_free

    def admit(self, sequence: Sequence) -> None:
        """Gives a request its blocks. KV that was swapped out or is found in the cache is reused.

        The request is charged with the tokens of its prefixes that no other request has been charged with.
        """
        is_swapped = self._swap.holds(sequence)
        if self.cache is not None and not is_swapped:
            self.cache.reuse(sequence)
        sequence.reserve(self.pool, self._reserve.num_tokens(sequence), self._block_size)
        if is_swapped:
            self._swap.restore(sequence, self._block_size)
        sequence.admission = self._num_admitted
        self._num_admitted += 1
        if sequence.node is not None:
            sequence.num_charged += sequence.node.charge()

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `num_tokens` own tokens can be held."""
        return self._num_blocks(num_tokens) - len(sequence.block_ids) <= self.pool.num_free

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        num_blocks = self._num_blocks(self._reserve.num_tokens(sequence))
        if self.cache is not None and not self._swap.holds(sequence):
            num_blocks -= self.cache.num_found_in_use(sequence)
        return num_blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self._block_size)
