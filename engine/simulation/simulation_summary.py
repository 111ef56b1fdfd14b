"""A simulated run in numbers: steps, tokens, memory, time, and what bounds it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from engine.simulation.simulation import Resource, SimulatedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSummary:
    """Sums over the steps of one or several simulated plans that run one after the other.

    Attributes:
        num_prompt_tokens: prefixes and suffixes computed; recomputed ones after a preemption count again.
        num_decode_tokens: rows that continued an answer.
        peak_kv_blocks: the most that one step holds.
        peak_running_requests: the most that hold KV at the end of a step.
        seconds: predicted.
        seconds_by_resource: the same, by what bounds each step.
        cool_down_seconds: the same, of steps that were not full because nothing was left to start.
    """

    num_steps: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_finished_requests: int
    num_preempted_requests: int
    peak_kv_blocks: int
    peak_running_requests: int
    seconds: float
    seconds_by_resource: Mapping[Resource, float]
    cool_down_seconds: float

    @property
    def bound(self) -> Resource:
        """The resource that bounds the longest part of the time."""
        return max(self.seconds_by_resource, key=self.seconds_by_resource.__getitem__)


def summarize_steps(steps: Iterable[SimulatedStep]) -> SimulationSummary:
    """Reads the steps once; they are not kept."""
    num_steps = num_prompt = num_decode = num_finished = num_preempted = peak_blocks = peak_running = 0
    cool_down_seconds = 0.0
    seconds: dict[Resource, float] = dict.fromkeys(get_args(Resource), 0.0)
    for step in steps:
        record = step.record
        num_steps += 1
        num_prompt += record.num_prefix_tokens + record.num_suffix_tokens
        num_decode += record.num_decode_tokens
        num_finished += record.num_finished_requests
        num_preempted += record.num_preempted_requests
        peak_blocks = max(peak_blocks, record.num_kv_blocks_used)
        peak_running = max(peak_running, record.num_running_requests)
        seconds[step.resource] += step.cost.seconds
        if step.is_cool_down:
            cool_down_seconds += step.cost.seconds
    return SimulationSummary(
        num_steps=num_steps,
        num_prompt_tokens=num_prompt,
        num_decode_tokens=num_decode,
        num_finished_requests=num_finished,
        num_preempted_requests=num_preempted,
        peak_kv_blocks=peak_blocks,
        peak_running_requests=peak_running,
        seconds=sum(seconds.values()),
        seconds_by_resource=seconds,
        cool_down_seconds=cool_down_seconds,
    )
