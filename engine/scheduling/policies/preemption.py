"""Preemption: which request loses its KV memory when it runs out, and the host memory that may keep its KV.

The running request that was admitted last is preempted. Idle prefixes are evicted where no request runs.

"recompute"
    its KV is dropped; the KV of the prompt and of the generated tokens is computed again later.
"swap"
    its KV is copied to host memory and back, within a budget of host blocks; beyond the budget it is recomputed.
"kill"
    it ends with an error. The only running request is never killed: alone it fits once idle prefixes are evicted.
"""

from collections import defaultdict
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.device.free_memory import free_host_bytes
from engine.kv.block_pool import BlockPool
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from engine.kv.kv_cache import KVCache
    from engine.scheduling.scheduler import Scheduler
    from engine.scheduling.step import Step


def make_room(scheduler: "Scheduler", sequence: Sequence, num_tokens: int, step: "Step") -> bool:
    """Preempts running requests, the latest first, until a decoding sequence can grow to `num_tokens` own tokens; False
    if it is itself preempted. The step being scheduled counts the preemptions. See `Step`."""
    latest: Sequence | None = None
    while latest is not sequence and not scheduler.admission.can_grow(sequence, num_tokens):
        queues = scheduler.queues
        latest = max((*queues.decoding, *queues.prefilling), key=attrgetter("admission"))
        _preempt(scheduler, latest, step)
    return latest is not sequence


def _preempt(scheduler: "Scheduler", sequence: Sequence, step: "Step") -> None:
    """Frees a request's KV and puts it first in the queue; under "kill", ends it where others run."""
    queues = scheduler.queues
    step.num_preempted += 1
    if scheduler.config.preemption == "kill" and queues.num_running > 1:
        step.killed.append(sequence)
        scheduler.drop(sequence, "error")
        queues.forget_released_prefixes()
        return
    if sequence.label >= 0 and sequence.num_computed > sequence.num_suffix:
        sequence.start_label(sequence.label)  # later labels need the KV that windows see at the prompt's end, too
    if scheduler.swap is not None and scheduler.swap.save(sequence, scheduler.pool):
        sequence.free_blocks(scheduler.pool)
    else:
        sequence.release(scheduler.pool)
    queues.requeue(sequence)


def evict_idle_prefixes(scheduler: "Scheduler") -> None:
    """Frees every prefix that the next request does not need. Called when no request runs, so none is in use."""
    queues = scheduler.queues
    queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
    for sequence in queues.ready:
        queued[sequence.node].append(sequence)
    groups = [*queued.values(), *queues.prefixes.values(), *queues.waiting_groups]
    chains = [group[0].prefix_nodes() for group in groups]
    kept, nodes = set(chains[0]), set(chain.from_iterable(chains))
    for node in sorted(nodes - kept, key=lambda node: -node.start):
        node.release(scheduler.pool)
    queues.restart(groups)


class SwapSpace:
    """Own KV of preempted requests, in host memory, for at most `num_blocks` blocks of `cache`; None in a simulation,
    whose KV memory has no contents. With 0 blocks it keeps nothing, and all KV is recomputed."""

    def __init__(self, cache: "KVCache | None", num_blocks: int) -> None:
        self._cache = cache
        self._kept: dict[Sequence, Any] = {}
        self.num_blocks = num_blocks
        self.num_used = 0

    @classmethod
    def of_run(cls, config: EngineConfig, cache: "KVCache", device: "torch.device") -> "SwapSpace":
        """The swap space of a run.

        Args:
            config: its `swap_memory_bytes`; "auto" is the size of the KV memory, at most half of the free memory.
            cache: the run's KV memory.
            device: computes the run.
        """
        if config.swap_memory_bytes == "auto":
            num_bytes = min(cache.num_blocks * cache.block_bytes, free_host_bytes() // 2)
        else:
            num_bytes = config.swap_memory_bytes
        # Pinned memory is allocated in powers of two, up to twice the size that is asked for.
        return cls(cache, (num_bytes if device.type == "cpu" else num_bytes // 2) // cache.block_bytes)

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._kept

    def save(self, sequence: Sequence, pool: BlockPool) -> bool:
        """Copies a sequence's computed own KV, if the copy fits; returns whether it did."""
        block_ids = pool.written_blocks(sequence)
        if not 0 < len(block_ids) <= self.num_blocks - self.num_used:
            return False
        self._kept[sequence] = None if self._cache is None else self._cache.read_blocks(block_ids)
        self.num_used += len(block_ids)
        return True

    def restore(self, sequence: Sequence, pool: BlockPool) -> None:
        """Writes a sequence's KV into its blocks, and drops the copy."""
        block_ids = pool.written_blocks(sequence)
        kept = self._kept.pop(sequence)
        if self._cache is not None:
            self._cache.write_blocks(block_ids, kept)
        self.num_used -= len(block_ids)
