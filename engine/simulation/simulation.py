"""A run of a plan without a model: the real scheduler and block pool, expected answer lengths, predicted step times.

Which tokens a step computes depends on the model only through the lengths of answers. So a simulation with the lengths
of a real run has the same steps, token counts, preemptions and KV blocks; only the time is predicted.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from engine.completion import FinishReason
from engine.config import EngineConfig
from engine.execution.step_record import StepRecord, record_step
from engine.planning.group import PrefixGroup
from engine.request import Request
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, most_blocks
from engine.scheduling.step import Step
from engine.simulation.device import Roofline, StepCost, StepWork

Resource = Literal["compute", "memory bandwidth", "KV capacity", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step.

    Attributes:
        record: as in a real run, with a predicted duration_ms.
        is_held_back: requests were waiting and the step had room for their tokens, but there was no KV memory for them.
        is_busy: the step is full (its tokens, padding included, reach max_num_batched_tokens) or leaves requests
            waiting. The steps after a plan's last busy one are its cool-down, as in
            ``sql/report/steps/timeline.sql``; TECD leaves it out (BatchLLM section 6.3.2).
    """

    record: StepRecord
    cost: StepCost
    is_held_back: bool
    is_busy: bool

    @property
    def resource(self) -> Resource:
        """The resource that limits this step. A step that is not bound by compute takes hardly longer with more tokens,
        so where requests were held back, it is limited by KV capacity."""
        cost = self.cost
        longest = max(cost.compute_s, cost.memory_s, cost.host_s)
        if cost.compute_s == longest:
            return "compute"
        if self.is_held_back:
            return "KV capacity"
        return "memory bandwidth" if cost.memory_s == longest else "host"


def simulate_plan(
    requests: Sequences[Request],
    groups: Sequences[PrefixGroup],
    *,
    num_answer_tokens: int | None = None,
    num_kv_blocks: int,
    config: EngineConfig,
    roofline: Roofline,
    windows: tuple[int, ...] = (0,),
) -> Iterator[SimulatedStep]:
    """Runs a plan as `Engine.run_plan` does; requests that the KV memory cannot hold even alone are left out.

    Args:
        groups: their members' request_indices point into `requests`.
        num_answer_tokens: length of every answer, at most its request's max_new_tokens; >= 1. None: as each request
            expects.
        config: the policies, and the limits of a step. Host memory for swapped KV is assumed to suffice, and the time
            of its copies is not counted.
        windows: of the block tables of the model's layers (`KVLayout`).
    """
    pool = make_pool(config, num_kv_blocks, windows)
    oversized = find_oversized(requests, config.block_size, num_kv_blocks // pool.num_tables)
    scheduler = Scheduler(
        schedule_groups(requests, groups, oversized, config),
        pool=pool,
        config=config,
        swap=SwapSpace(None, num_kv_blocks) if config.preemption == "swap" else None,
    )

    def follow(sequence: Sequence, place: int, token: int) -> tuple[Sequences[int], FinishReason | None]:
        request = sequence.request
        most = num_answer_tokens or request.expected_output_tokens or request.max_new_tokens
        return (), "length" if place + 1 - sequence.num_suffix >= most else None

    number, window_shares = 0, roofline.window_shares
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        # With room left in a step without prefixes, requests wait only for lack of memory.
        num_waiting = scheduler.num_unfinished - scheduler.queues.num_running
        can_start = config.batching == "continuous" and scheduler.queues.has_free_place
        is_held_back = step.room > 0 and num_waiting > 0 and not step.prefixes and can_start
        cost = roofline.cost(measure_work(step, window_shares))
        answered = scheduler.commit(step, [0] * len(step.sampled), follow)
        record = record_step(step, answered, scheduler, number=number, duration_ms=cost.seconds * 1e3)
        is_full = record.num_tokens + record.num_padding_tokens >= config.step_tokens
        is_busy = is_full or record.num_waiting_requests > 0
        yield SimulatedStep(record=record, cost=cost, is_held_back=is_held_back, is_busy=is_busy)
        number += 1
    assert pool.num_used == 0, f"{pool.num_used} KV blocks are still held after the last request"


def find_oversized(requests: Sequences[Request], block_size: int, num_kv_blocks: int) -> set[int]:
    """Indices of requests that a pool of `num_kv_blocks`, blocks of all layers, cannot hold even alone; the engine
    answers them with an error. See `most_blocks`."""
    return {index for index, request in enumerate(requests) if most_blocks(request, block_size) > num_kv_blocks}


def measure_work(step: Step, window_shares: Iterable[tuple[int, float]] = ((0, 1),)) -> StepWork:
    """Counts the rows of a step and the tokens that they attend to, before the step is committed. `window_shares` has
    numbers of positions that a row sees, 0 for all, each with the share of the layers with this window."""
    num_rows = num_output_rows = 0
    num_pairs = num_read = 0.0
    spans: list[tuple[int, int, int]] = []  # rows, own tokens before them, tokens of the prefix before those
    members: dict[PrefixNode, int] = {}  # own tokens before the rows of the member that sees most of the prefix
    for sequence, count in (*step.decodes, *step.suffixes):
        earlier, rows = sequence.num_computed, max(count, step.padded_length)
        num_rows += rows
        spans.append((rows, earlier, sequence.prefix_length))
        if sequence.node is not None:
            members[sequence.node] = min(earlier, members.get(sequence.node, earlier))
        if sequence.request.mode == "generate":
            num_output_rows += count == sequence.length - earlier
        elif sequence.label >= 0 and earlier >= sequence.num_suffix:
            num_output_rows += count  # normalised over the vocabulary, unlike a label's first token
    for node, count in step.prefixes.items():
        rows = max(count, step.padded_length)
        num_rows += rows
        spans.append((rows, node.start + node.num_computed, 0))
    for window, share in window_shares:
        pairs = sum(_num_pairs(rows, prefix + earlier, window) for rows, earlier, prefix in spans)
        read = sum(rows + _num_seen(earlier, window) for rows, earlier, _ in spans)
        read += sum(
            node.end if not window else min(node.end, max(0, window - 1 - earlier)) for node, earlier in members.items()
        )
        num_pairs, num_read = num_pairs + share * pairs, num_read + share * read
    return StepWork(
        num_rows=num_rows, num_output_rows=num_output_rows, num_attention_pairs=num_pairs, num_kv_tokens_read=num_read
    )


def _num_pairs(rows: int, earlier: int, window: int) -> int:
    """Number of pairs (row, token that it sees) of consecutive rows after `earlier` tokens."""
    growing = rows if not window else max(0, min(rows, window - earlier))
    return growing * earlier + growing * (growing + 1) // 2 + (rows - growing) * window


def _num_seen(earlier: int, window: int) -> int:
    """Number of earlier tokens that a row sees."""
    return earlier if not window else min(earlier, window - 1)


@dataclass(slots=True, kw_only=True)
class SimulationSummary:
    """Sums over the steps of a simulated plan. Two summaries add up to that of both plans, one after the other.

    Attributes:
        num_prompt_tokens: of prefixes and suffixes; tokens that are recomputed after a preemption count again.
        num_decode_tokens: rows that continue an answer.
        peak_running_requests: the most requests that hold KV at the end of a step.
        seconds: predicted.
        seconds_by_resource: the same, by the resource that limits each step.
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
        """The resource that limits the longest part of the time."""
        return max(self.seconds_by_resource, key=self.seconds_by_resource.__getitem__)

    def __add__(self, other: "SimulationSummary") -> "SimulationSummary":
        mine, others = asdict(self), asdict(other)
        of_resources, of_others = mine.pop("seconds_by_resource"), others.pop("seconds_by_resource")
        joined = {
            name: max(value, others[name]) if name.startswith("peak_") else value + others[name]
            for name, value in mine.items()
        }
        seconds = {resource: of_resources[resource] + of_others[resource] for resource in of_resources}
        return SimulationSummary(**joined, seconds_by_resource=seconds)


def summarize_steps(steps: Iterable[SimulatedStep]) -> SimulationSummary:
    """Sums up the steps of one plan while they are iterated; they are not kept."""
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
