"""A simulated run in numbers: steps, tokens, memory, time, what bounds it, and its cool-down."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from engine.simulation.simulation import Resource, SimulatedStep


@dataclass(slots=True, kw_only=True)
class SimulationSummary:
    """Sums over the steps of a simulated plan; the sum of two summaries is that of the plans one after the other.

    Attributes:
        num_prompt_tokens: prefixes and suffixes computed; recomputed ones after a preemption count again.
        num_decode_tokens: rows that continued an answer.
        peak_kv_blocks: the most that one step holds.
        peak_running_requests: the most that hold KV at the end of a step.
        seconds: predicted.
        seconds_by_resource: the same, by what bounds each step.
        num_cool_down_steps, cool_down_seconds: of the steps after each plan's last busy one, see `SimulatedStep`.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_finished_requests: int = 0
    num_preempted_requests: int = 0
    peak_kv_blocks: int = 0
    peak_running_requests: int = 0
    seconds: float = 0.0
    seconds_by_resource: dict[Resource, float] = field(default_factory=lambda: dict.fromkeys(get_args(Resource), 0.0))
    num_cool_down_steps: int = 0
    cool_down_seconds: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Prompt and decode tokens."""
        return self.num_prompt_tokens + self.num_decode_tokens

    @property
    def bound(self) -> Resource:
        """The resource that bounds the longest part of the time."""
        return max(self.seconds_by_resource, key=self.seconds_by_resource.__getitem__)

    def __add__(self, other: "SimulationSummary") -> "SimulationSummary":
        mine, others = self.seconds_by_resource, other.seconds_by_resource
        return SimulationSummary(
            num_steps=self.num_steps + other.num_steps,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_decode_tokens=self.num_decode_tokens + other.num_decode_tokens,
            num_finished_requests=self.num_finished_requests + other.num_finished_requests,
            num_preempted_requests=self.num_preempted_requests + other.num_preempted_requests,
            peak_kv_blocks=max(self.peak_kv_blocks, other.peak_kv_blocks),
            peak_running_requests=max(self.peak_running_requests, other.peak_running_requests),
            seconds=self.seconds + other.seconds,
            seconds_by_resource={resource: mine[resource] + others[resource] for resource in mine},
            num_cool_down_steps=self.num_cool_down_steps + other.num_cool_down_steps,
            cool_down_seconds=self.cool_down_seconds + other.cool_down_seconds,
        )


def summarize_steps(steps: Iterable[SimulatedStep]) -> SimulationSummary:
    """Reads the steps of one plan once; they are not kept."""
    summary = SimulationSummary()
    for step in steps:
        record, seconds = step.record, step.cost.seconds
        summary.num_steps += 1
        summary.num_prompt_tokens += record.num_prefix_tokens + record.num_suffix_tokens
        summary.num_decode_tokens += record.num_decode_tokens
        summary.num_finished_requests += record.num_finished_requests
        summary.num_preempted_requests += record.num_preempted_requests
        summary.peak_kv_blocks = max(summary.peak_kv_blocks, record.num_kv_blocks_used)
        summary.peak_running_requests = max(summary.peak_running_requests, record.num_running_requests)
        summary.seconds += seconds
        summary.seconds_by_resource[step.resource] += seconds
        summary.num_cool_down_steps = 0 if step.is_busy else summary.num_cool_down_steps + 1
        summary.cool_down_seconds = 0.0 if step.is_busy else summary.cool_down_seconds + seconds
    return summary
