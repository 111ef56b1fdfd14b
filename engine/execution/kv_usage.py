"""Who holds the KV memory at one moment."""

from dataclasses import dataclass

from engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """KV blocks by who holds them; the scheduler's properties of these names say what they count."""

    num_used: int
    num_prefix: int
    num_request: int
    num_cached: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> "KVUsage":
        return cls(
            num_used=scheduler.pool.num_used,
            num_prefix=scheduler.num_prefix_blocks,
            num_request=scheduler.num_request_blocks,
            num_cached=scheduler.num_cached_blocks,
        )
