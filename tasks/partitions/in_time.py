"""Tries a partition's rows slice by slice, so that a deadline leaves answers behind however few of the rows fit."""

import time

import numpy as np

from engine.planning.cheapest_first import rank_cheapest_first
from engine.planning.plan import Plan
from engine.planning.plan_partitions import group_costs
from tasks.partitions.attempt import Failure, try_rows
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.partitions.partition_work import PartitionWork, Piece

FIRST_TOKENS = 4_096
"""Cost of the first slice, by whose time the next ones are chosen, and the least of any."""

CERTAIN_SHARE = 0.8
"""Rows that should take at most this share of the time left are tried together."""

SLICE_SHARE = 0.25
"""Of the time left, for a slice where the rows do not fit. An engine begins many rows before it ends the first, and
those of the slice in which the deadline comes are lost."""


def try_in_time(rows: Plan, work: PartitionWork, whole: Piece, deadline: float) -> Failure | None:
    """Try rows in slices of whole groups, by priority, then the cheapest a row first; a slice is answered before the
    next one begins. Returns the first failure, and raises, as `try_rows`.

    Args:
        rows: of the partition `whole`, those without an answer.
        deadline: Unix time.
    """
    job = work.job
    with PROCESS_HOST.use(job):  # loaded before the first slice, which is timed
        pass
    lengths = [each.expected_output_tokens or each.workload.kind.max_answer_tokens for each in job.members]
    costs, starts = group_costs(rows, max(lengths)), rows.group_starts
    priorities = np.maximum.reduceat(rows.priority, starts)
    ranks = rank_cheapest_first(costs, priorities, np.diff(starts, append=rows.num_rows))
    order = np.argsort(-ranks, kind="stable")
    group_of_row = np.cumsum(rows.is_group_start) - 1
    ends, num_done, most_tokens = np.cumsum(costs[order]), 0, float(FIRST_TOKENS)
    while num_done < len(order):
        num_before = int(ends[num_done - 1]) if num_done else 0
        end = max(num_done + 1, int(np.searchsorted(ends, num_before + most_tokens, side="right")))
        begun_at = time.monotonic()
        failure = try_rows(rows.select(np.isin(group_of_row, order[num_done:end])), work, whole)
        if failure is not None:
            return failure
        work.attempts.forget(whole)
        num_tokens = int(ends[end - 1])
        rate = (num_tokens - num_before) / (time.monotonic() - begun_at)
        fitting = rate * max(0.0, deadline - time.time())
        num_left = int(ends[-1]) - num_tokens
        most_tokens = num_left if num_left <= CERTAIN_SHARE * fitting else max(FIRST_TOKENS, SLICE_SHARE * fitting)
        num_done = end
    return None
