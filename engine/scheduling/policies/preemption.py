"""Who loses KV memory when it runs out, what becomes of such a request, and the host memory that may keep its KV.

Idle prefixes go first; then the request that was admitted last, of those that run.

"recompute"
    its KV is dropped; the prompt and what was generated are computed again later.
"swap"
    its KV is copied to host memory and back, while a budget of host blocks lasts; beyond it, recompute.
"kill"
    it ends with an error. The last request that runs is never killed: alone it fits once idle prefixes are gone.
"""

from collections import defaultdict, deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import ScheduledGroup, Sequence

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler
    from engine.scheduling.step import Step


def make_room(scheduler: "Scheduler", sequence: Sequence, num_tokens: int, step: "Step") -> bool:
    """Takes KV from running requests, the latest first, until a sequence can grow; False if it loses its own.

    Args:
        scheduler: of the run.
        sequence: which decodes.
        num_tokens: own tokens that it is to hold.
        step: counts those who lose their memory.
    """
    latest: Sequence | None = None
    while latest is not sequence and not scheduler.admission.can_grow(sequence, num_tokens):
        queues = scheduler.queues
        latest = max((*queues.decoding, *queues.prefilling), key=attrgetter("admission"))
        _preempt(scheduler, latest, step)
    return latest is not sequence


def _preempt(scheduler: "Scheduler", sequence: Sequence, step: "Step") -> None:
    """Takes a request's KV, and queues it first, or kills it where another one still runs."""
    queues = scheduler.queues
    step.num_preempted += 1
    if scheduler.config.preemption == "kill" and queues.num_running > 1:
        step.killed.append(sequence)
        scheduler.drop(sequence)
        queues.prefixes = {node: waiting for node, waiting in queues.prefixes.items() if node.holds_blocks}
        return
    if scheduler.swap is not None and scheduler.swap.save(sequence, scheduler.config.block_size):
        sequence.free_blocks(scheduler.pool)
    else:
        sequence.release(scheduler.pool)
    queues.stop(sequence)
    queues.ready.appendleft(sequence)


def evict_idle_prefixes(scheduler: "Scheduler") -> None:
    """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
    queues = scheduler.queues
    queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
    for sequence in queues.ready:
        queued[sequence.node].append(sequence)
    groups = [ScheduledGroup(node=node, sequences=found) for node, found in (*queued.items(), *queues.prefixes.items())]
    groups += queues.waiting_groups
    kept = set(groups[0].node.chain()) if groups[0].node is not None else set()
    nodes = {node for group in groups if group.node is not None for node in group.node.chain()}
    for node in sorted(nodes - kept, key=lambda node: -node.start):
        node.release(scheduler.pool)
    queues.ready.clear()
    queues.prefixes.clear()
    queues.waiting_groups = deque(groups)


class BlockStore(Protocol):
    """KV memory whose blocks can be taken out and put back, here or by another process."""

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Any:
        """A copy of the blocks' KV in host memory."""

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: Any) -> None:
        """Writes what `read_blocks` gave into as many blocks."""


class SwapSpace:
    """Own KV of preempted requests, in host memory. With no blocks it keeps nothing, and all is recomputed.

    Args:
        store: the KV memory that blocks are copied from and to.
        num_blocks: most blocks that are kept at once.
        windows: of each block table, where there are several (`KVLayout`).
    """

    __slots__ = ("_kept", "_store", "_windows", "num_blocks", "num_used")

    def __init__(self, store: BlockStore, num_blocks: int, windows: tuple[int, ...] = ()) -> None:
        self._store = store
        self._windows = windows
        self._kept: dict[Sequence, Any] = {}
        self.num_blocks = num_blocks
        self.num_used = 0

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._kept

    def save(self, sequence: Sequence, block_size: int) -> bool:
        """Copies what is computed of the own KV, if the copy fits; whether it did."""
        block_ids = self._written_blocks(sequence, block_size)
        if not 0 < len(block_ids) <= self.num_blocks - self.num_used:
            return False
        self._kept[sequence] = self._store.read_blocks(block_ids)
        self.num_used += len(block_ids)
        return True

    def restore(self, sequence: Sequence, block_size: int) -> None:
        """Writes a sequence's KV into its blocks, and gives up the copy."""
        block_ids = self._written_blocks(sequence, block_size)
        self._store.write_blocks(block_ids, self._kept.pop(sequence))
        self.num_used -= len(block_ids)

    def _written_blocks(self, sequence: Sequence, block_size: int) -> npt.NDArray[np.int32]:
        if not self._windows:
            return sequence.block_ids[: cdiv(sequence.num_computed, block_size)]
        from engine.scheduling.windowed_pool import written_blocks

        return written_blocks(sequence, self._windows, block_size)
