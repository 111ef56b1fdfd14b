"""Which requests get KV memory, and how much of it is set aside for the tokens that they are expected to generate."""

import math

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.request import Request
from engine.scheduling.lru_pool import LruPool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.sequence import ScheduledGroup, Sequence, most_extra_tokens
from engine.scheduling.windowed_pool import WindowedPool

_ANSWERS_FOR_AN_ESTIMATE = 16


def make_pool(config: EngineConfig, num_blocks: int, windows: tuple[int, ...] = (0,)) -> BlockPool:
    """A pool of `num_blocks` for a sharing policy and for the windows of a model's block tables. See `KVLayout`."""
    if any(windows):
        return WindowedPool(num_blocks, config.block_size, windows)
    make = LruPool if config.sharing == "lru" else BlockPool
    return make(num_blocks, config.block_size)


class OutputReserve:
    """Expected answer lengths, corrected by the answers of the run.

    For the first 16 answers a request's own estimate is used, or its max_new_tokens where it has none. After that,
    estimates are multiplied by the ratio of actual to estimated tokens so far, and requests without an estimate expect
    the mean length. No request expects more than its max_new_tokens. `share` of the expected length is set aside: 0
    admits by the blocks held now (Algorithm 2 of BatchLLM), 1 preempts only where answers are longer than expected.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        # Of finished answers, [with, without] an estimate; without one the expected tokens are 1 each.
        self._num_answers, self._num_expected_tokens, self._num_tokens = [0, 0], [0, 0], [0, 0]

    def book(self, sequence: Sequence) -> None:
        """Counts a finished answer."""
        if sequence.request.mode == "generate":
            estimate = sequence.request.expected_output_tokens
            lacks_estimate = estimate is None
            self._num_answers[lacks_estimate] += 1
            self._num_expected_tokens[lacks_estimate] += estimate or 1
            self._num_tokens[lacks_estimate] += sequence.num_output_tokens

    def num_tokens(self, sequence: Sequence) -> int:
        """Own tokens to reserve memory for: the known ones, and the share of those still expected."""
        most = most_extra_tokens(sequence.request)
        num_own_tokens = sequence.num_suffix + min(self._expected_tokens(sequence.request), most)
        return sequence.length + math.ceil(max(0, num_own_tokens - sequence.length) * self._share)

    def _expected_tokens(self, request: Request) -> int:
        estimate = request.expected_output_tokens
        lacks_estimate = estimate is None
        if request.mode != "generate" or self._num_answers[lacks_estimate] < _ANSWERS_FOR_AN_ESTIMATE:
            return request.max_new_tokens if estimate is None else estimate
        return math.ceil((estimate or 1) * self._num_tokens[lacks_estimate] / self._num_expected_tokens[lacks_estimate])


class Admission:
    """Memory-centric admission (BatchLLM section 4.3.3): a request starts when its KV fits, expected tokens included.
    With an `LruPool`, requests begin with the blocks that are found in it. `swap` may hold KV of preempted
    requests; it is None where nothing is swapped."""

    def __init__(self, pool: BlockPool, reserve: OutputReserve, swap: SwapSpace | None) -> None:
        self.pool = pool
        self.reserve = reserve
        self._swap = swap
        self._num_admitted = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether a request's own KV fits now, with its expected tokens."""
        return self._num_missing_blocks(sequence) <= self.pool.num_free

    def fits_group(self, group: ScheduledGroup) -> bool:
        """Whether a group's prefix fits now together with its first request."""
        num_missing, node = self._num_missing_blocks(group[0]), group[0].node
        if node is not None:
            num_missing += node.num_missing_blocks(self.pool)
        return num_missing <= self.pool.num_free

    def admit(self, sequence: Sequence) -> None:
        """Allocates a request's blocks. KV that was swapped out or is found in the pool is reused. Prefix tokens that
        no other request has been charged with are charged to this one."""
        swap = self._swap if self._swap is not None and self._swap.holds(sequence) else None
        if swap is None:
            self.pool.reuse(sequence)
        sequence.reserve(self.pool, self.reserve.num_tokens(sequence))
        if swap is not None:
            swap.restore(sequence, self.pool)
        sequence.admission = self._num_admitted
        self._num_admitted += 1
        if sequence.node is not None:
            sequence.num_charged += sequence.node.charge()

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence can get blocks for `num_tokens` own tokens."""
        return self.pool.num_missing(sequence, num_tokens) <= self.pool.num_free

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        num_blocks = self.pool.num_missing(sequence, self.reserve.num_tokens(sequence))
        if self._swap is None or not self._swap.holds(sequence):
            num_blocks -= self.pool.num_found_in_use(sequence)
        return num_blocks
