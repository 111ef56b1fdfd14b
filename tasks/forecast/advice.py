"""Advice that makes a run shorter: settings tried on a few partitions, and sentences derived from a forecast."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.simulation.simulation import SimulationSummary
from tasks.forecast.forecast import FieldOrder, KeptPrefixes, Prediction, SharingPolicy, WhatIf

WHAT_IF_PARTITIONS = 4
"""Partitions on which a changed setting is tried."""

MORE_TOKENS = 4
"""Factor by which the tokens of a step and of a partition are multiplied in a trial; memory is doubled."""

LEAST_GAIN = 0.05
"""A gain below this share of the time, or of the prompt text, is not mentioned."""


def try_settings(
    simulate: Callable[[EngineConfig, int, int, int], SimulationSummary],
    config: EngineConfig,
    kv_bytes: int,
    most_kv_bytes: int,
    run: SimulationSummary,
    partition_seconds: Sequence[float],
) -> tuple[WhatIf, ...]:
    """Simulate some partitions with one setting changed; the most helpful change comes first.

    Args:
        simulate: takes a configuration, bytes of KV, a first partition, and how many partitions from it on are joined.
        config, kv_bytes: the present configuration and KV memory.
        most_kv_bytes: memory that the device has for KV; twice the KV memory is tried only where it fits.
        run, partition_seconds: the simulation of all partitions with both, and of each.
    """
    busy = [partition for partition, seconds in enumerate(partition_seconds) if seconds]  # not of oversized rows alone
    if not busy:
        return ()
    num_partitions, num_tried = len(partition_seconds), min(WHAT_IF_PARTITIONS, len(busy))
    chosen = [busy[index * len(busy) // num_tried] for index in range(num_tried)]
    seconds_before = sum(partition_seconds[partition] for partition in chosen)
    longer = replace(config, max_num_batched_tokens=MORE_TOKENS * config.step_tokens)
    tried = [(f"--max-num-batched-tokens {longer.max_num_batched_tokens}", longer, kv_bytes)]
    if run.seconds_by_resource["KV capacity"] > 0 and 2 * kv_bytes <= most_kv_bytes:
        tried.append(("--kv-memory times 2", config, 2 * kv_bytes))
    what_ifs = []
    for option, changed, changed_bytes in tried:
        seconds = sum(simulate(changed, changed_bytes, partition, 1).seconds for partition in chosen)
        what_ifs.append(WhatIf(option=option, time_ratio=seconds / seconds_before, num_partitions=num_tried))
    if num_partitions > 1:
        num_joined = min(MORE_TOKENS, num_partitions)
        first = min(busy[max(0, len(busy) - num_joined) // 2], num_partitions - num_joined)
        ratio = simulate(config, kv_bytes, first, num_joined).seconds / sum(partition_seconds[first:][:num_joined])
        option = f"--partition-tokens times {num_joined}"
        what_ifs.append(WhatIf(option=option, time_ratio=ratio, num_partitions=num_joined))
    return tuple(sorted(what_ifs, key=lambda what_if: what_if.time_ratio))


def advise(
    policies: Sequence[SharingPolicy],
    best_saving_ratio: float,
    orders: Sequence[FieldOrder],
    prediction: Prediction | None,
    block_size: int | None,
    num_partitions: int,
) -> tuple[str, ...]:
    """Sentences of advice: first about the template, then about settings, the most helpful first.

    Args:
        policies: the last but one is the plan, the last one the plan in partitions; see `Forecast`.
        orders: of the template's fields, best first.
        block_size: tokens of the blocks that groups share; None if they share none.
        num_partitions: of the plan.
    """
    sentences = []
    current = next((order for order in orders if order.is_current), None)
    if current is not None and orders[0].saving_ratio - current.saving_ratio >= LEAST_GAIN:
        sentences.append(
            f"Put the template's fields in the order {', '.join(orders[0].fields)}: about "
            f"{orders[0].saving_ratio:.0%} of the text is shared then, {current.saving_ratio:.0%} now."
        )
    if prediction is None:
        return tuple(sentences)
    for what_if in prediction.what_ifs:
        if what_if.time_ratio <= 1 - LEAST_GAIN:
            sentences.append(f"{what_if.option} would take {1 - what_if.time_ratio:.0%} less time.")
    planned, run = policies[-2].token_saving_ratio, policies[-1].token_saving_ratio
    if best_saving_ratio - planned >= LEAST_GAIN:
        remedy = "--sharing path" if block_size is None else "a smaller --block-size"
        sentences.append(
            f"{best_saving_ratio - planned:.0%} of the prompt tokens are shared, too, but within blocks or on deeper "
            f"levels than the plan uses: {remedy} reaches more of them."
        )
    num_lost, num_oversized = prediction.run.num_preempted_requests, prediction.num_oversized_rows
    if planned - run >= LEAST_GAIN and num_partitions > 1 and not num_lost:
        what = f"{planned - run:.0%} of the prompt tokens are computed by several partitions each"
        sentences.append(f"{what}: raise --partition-tokens.")
    busy_share = prediction.run.seconds / (prediction.num_engines * prediction.seconds) if prediction.seconds else 1.0
    if (idle_share := 1 - busy_share) >= LEAST_GAIN:
        what = f"The {prediction.num_engines} engines have nothing to do for {idle_share:.0%} of their time"
        sentences.append(f"{what}: lower --partition-tokens, or use fewer.")
    if num_oversized:
        sentences.append(f"{num_oversized:,} rows need more KV memory than there is: raise --kv-memory.")
    if num_lost:
        what = f"{num_lost:,} requests lose their KV before they are answered"
        sentences.append(f"{what}: raise --output-reserve or --kv-memory.")
    return tuple(sentences)


def advise_keeping(kept: KeptPrefixes | None) -> tuple[str, ...]:
    """A sentence about KV that later nights could read from disk, if that saves a second or is asked for."""
    if kept is None:
        return ()
    what = f"{kept.num_bytes / 1e9:,.2f} GB of KV for the {kept.num_tokens:,} tokens that these prompts share"
    times = f"read in {kept.read_seconds:.2g} s, computed in {kept.compute_seconds:.2g} s at least"
    saves = kept.compute_seconds - kept.read_seconds
    if kept.budget_bytes and saves <= 0:
        return (f"--keep-prefixes keeps nothing of {what}, {times}.",)
    if kept.budget_bytes:
        share = min(1.0, kept.budget_bytes / kept.num_bytes)
        return (f"--keep-prefixes keeps {share:.0%} of {what}, {times}, for later nights over the same documents.",)
    if saves < 1.0:
        return ()
    size = f"{max(1, math.ceil(kept.num_bytes / 1e9))}GB"
    return (f"--keep-prefixes {size} would keep {what}: a later night over the same documents has them {times}.",)
