"""When requests may start: at any step, or only when the batch before them is finished."""

import math
from collections.abc import Iterator

from engine.config import EngineConfig
from engine.scheduling.policies.packing import add_packed
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step


def admission_window_tokens(config: EngineConfig, *, is_idle: bool) -> float:
    """Prompt tokens that may start together now, as far as memory and `max_running_requests` allow; 0 for none.

    "continuous"
        any number at any step: a request that finishes makes room at once.
    "static"
        any number, once the whole batch before is finished. A batch is as many as memory or the cap allows.
    "dynamic"
        as "static", but a batch is limited by a window, too. A server's window is a time in which requests arrive;
        offline all of them have arrived, so the window is the prompt tokens of one step.
    """
    if config.batching == "continuous":
        return math.inf
    if not is_idle:
        return 0
    return math.inf if config.batching == "static" else config.step_tokens


class BatchQueues(RequestQueues):
    """As `RequestQueues`, but requests start as batches, and their prompts may be computed whole."""

    mixes_phases = False

    def add_prompts(self, step: Step) -> None:
        """See `RequestQueues.add_prompts`."""
        self._start_batch()
        self._add_batch_prefills(step)

    def _start_batch(self) -> None:
        """Admits as many requests as may start together, whether their prefix is computed yet or not."""
        window = self._admit_window(admission_window_tokens(self._config, is_idle=self.num_running == 0))
        while window > 0 and self.waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self.waiting_groups[0]):
                return
            group = self.waiting_groups.popleft()
            window -= self._start_prefix(group[0].node, ())
            self._admit(group[0])
            window -= group[0].num_uncomputed
            self.ready.extend(group[1:])
            window = self._admit_window(window)

    def _add_batch_prefills(self, step: Step) -> None:
        """Adds admitted prompts, in chunks or whole; requests before the prefixes that others wait for."""
        if self._config.prefill == "chunked":
            for sequence in self._ready_prompts():
                step.add(step.suffixes, sequence)
            for node in self.prefixes:
                node.add_to(step)
        else:
            tops = dict.fromkeys(node.next_to_compute() for node in self.prefixes)
            add_packed(step, [*self._ready_prompts(), *tops], self._config.packing, self._admission.pool.num_blocks)

    def _admit_window(self, window: float) -> float:
        """Admits ready requests while the window has tokens left; returns the rest, 0 where memory runs out."""
        while window > 0 and self.ready:
            if not self._can_admit(self.ready[0]):
                return 0
            sequence = self.ready.popleft()
            self._admit(sequence)
            window -= sequence.num_uncomputed
        return window

    def _ready_prompts(self) -> Iterator[Sequence]:
        for sequence in self.prefilling:
            is_ready = sequence.node is None or sequence.node.is_complete
            if is_ready and sequence.num_uncomputed:
                # num_reused is num_suffix until a step computes the first part of the prompt.
                if sequence.num_reused >= sequence.num_suffix:
                    self._admission.pool.reuse(sequence)  # finds blocks that were computed since it was admitted
                yield sequence
