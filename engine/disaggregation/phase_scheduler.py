"""The scheduler of a run whose prompts and decode tokens are computed by two processes, in steps of their own."""

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import Step


class PhaseScheduler(Scheduler):
    """As `Scheduler`; each step is of one phase."""

    def schedule_decodes(self, *, may_preempt: bool) -> Step:
        """A step of decode tokens alone.

        Args:
            may_preempt: False while steps are under way: requests without memory wait until these are committed.
        """
        step = self._new_step()
        self._add_decodes(step, may_preempt=may_preempt)
        return self._finalize(step)

    def schedule_prompts(self, step: Step | None = None) -> Step:
        """A step of prompts alone, for a process that decodes nothing; starts requests as memory allows.

        Args:
            step: an empty one that has counted preemptions already; None for a new one.
        """
        step = step or self._new_step()
        self._queues.add_prompts(step)
        return self._finalize(step)

    def evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        self._queues.evict_idle_prefixes()
