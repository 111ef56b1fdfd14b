"""Explains a workload before its model is loaded: its rows, what sharing saves, and how long it would take."""

from dataclasses import replace

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.config import EngineConfig
from engine.planning.plan import Plan
from engine.planning.planner import PlanMethod, plan_prompts
from engine.planning.prefix_tree import build_prefix_tree
from engine.simulation.simulation import SimulationSummary, find_oversized
from tasks.forecast.advice import advise, advise_keeping, try_settings
from tasks.forecast.forecast import Forecast, KeptPrefixes, KVMemory, Prediction, SharingPolicy, measure_shape
from tasks.forecast.hardware import Hardware
from tasks.forecast.prediction import predict
from tasks.layouts.field_orders import order_fields
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.read import AnswerLength, ReadResult, read_answer_length
from tasks.runs.run import Run
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.storage.plan_file import PlanSummary, plan_of_rows, read_plan_summary
from tasks.workers.engine_team import EngineTeam
from tasks.workloads.workload import Workload


@task(name="explain", retries=0, cache_policy=NO_CACHE, persist_result=False)
def explain(
    source: Source,
    workload: Workload,
    found: ReadResult,
    plan: ArtifactRef | None,
    run: Run,
    team: EngineTeam,
    hardware: Hardware,
) -> Forecast:
    """The forecast of one workload, for a team of engines, each on such hardware.

    Args:
        source: of the rows, and of config.json and the tokenizer.
        plan: of the rows found; None if there are none.
        run: the seconds of the earlier stages are in its record; gets those of this one.
    Raises:
        ArtifactError: a file is not what its reference says.
        CapacityError, ConfigError: the device cannot hold the model, or has no rate for its number format.
    """
    forecast = Forecast(
        workload=workload.name,
        mode=workload.kind.mode,
        model=source.model,
        num_already_done=found.num_already_done,
    )
    if plan is None:
        return forecast
    with run.measure("share"):
        rows, summary = read_all_rows(plan), read_plan_summary(plan)
        tree = build_prefix_tree(rows.prompts)
        counts = _count_tokens(rows, int(tree.leaf_lens.sum()), source.method, source.block_size)
        shape = measure_shape(tree, rows.groups())
    with run.measure("order fields"):
        num_prompts = len(workload.kind.suffixes)  # of a row
        row_ids = np.unique(rows.row_id // num_prompts)
        first_ids = np.minimum.reduceat(rows.row_id[tree.rows], tree.row_starts[:-1])  # of equal prompts, the first
        orders = order_fields(found.requests, row_ids, workload.prompt)
    prediction = kept = None
    num_lost: dict[str, int] = {}  # tokens of rows that do not fit, by the policies that are simulated
    if rows.num_rows:
        with run.measure("simulate"):
            answer = read_answer_length(run.database, workload)
            codec = TextCodec.load(source.checkpoint) if workload.kind.has_labels else None
            form = RequestForm.of(workload, codec, answer.expected_output_tokens)
            prediction = _simulate(rows, num_prompts, summary, form, answer, team, hardware)
        with run.measure("simulate a cache"):  # of blocks, with rows in the order of the key and the same KV memory
            lru = replace(team.engine, sharing="lru", order="fcfs", keep_prefixes_bytes=0, disaggregation="none")
            kv_bytes = hardware.kv_bytes(team.engine)
            cached = hardware.simulate(form.ask(rows), rows.groups(), lru, kv_bytes)
        kept = KeptPrefixes.measure(rows, team.engine, hardware, run.database)
        where = "one partition" if summary.num_partitions == 1 else f"{summary.num_partitions:,} partitions"
        as_run = f"as run, in {where}" + (", without rows that do not fit" if prediction.num_oversized_rows else "")
        in_cache = "LRU cache of blocks, order of the key"
        counts = {"none": counts.pop("none"), in_cache: cached.num_prompt_tokens, **counts}
        counts[as_run] = prediction.run.num_prompt_tokens  # partitions share nothing; preempted work is repeated
        num_lost = dict.fromkeys((in_cache, as_run), prediction.num_oversized_tokens)

    def find_ratio(num_tokens: int) -> float:
        return 1.0 - num_tokens / tree.num_logical_tokens if tree.num_logical_tokens else 0.0

    best = find_ratio(tree.num_trie_tokens)
    policies = tuple(
        SharingPolicy(
            name=name,
            num_processed_tokens=count,
            token_saving_ratio=find_ratio(count + num_lost.get(name, 0)),  # what is lost is not saved
        )
        for name, count in counts.items()
    )
    return replace(
        forecast,
        num_rows=found.num_selected,
        num_error_rows=found.num_selected - len(row_ids),
        num_duplicates=len(row_ids) - len(np.unique(first_ids // num_prompts)),
        num_prompt_tokens=tree.num_logical_tokens,
        num_partitions=summary.num_partitions,
        shape=shape,
        policies=policies,
        best_saving_ratio=best,
        field_orders=tuple(orders),
        prediction=prediction,
        kept_prefixes=kept,
        advice=(
            *advise(policies, best, orders, prediction, source.block_size, summary.num_partitions),
            *advise_keeping(kept),
        ),
        seconds=dict(run.record.seconds),
    )


def _count_tokens(rows: Plan, num_distinct_tokens: int, method: PlanMethod, block_size: int | None) -> dict[str, int]:
    """Token counts of ways to share prefixes over all rows, from no sharing to the plan's, before partitions cut it."""
    methods: tuple[PlanMethod, ...] = ("paper", "exact")
    processed = {each: plan_prompts(rows.prompts, method=each)[1].num_processed_tokens for each in methods}
    _, planned = plan_prompts(rows.prompts, method=method, block_size=block_size)
    return {
        "none": int(rows.num_prompt_tokens.sum()),
        "identical prompts once": num_distinct_tokens,
        "one level, paper": processed["paper"],
        "one level, exact": processed["exact"],
        f"{method}, {'without' if block_size is None else 'with'} shared runs on paths": planned.num_processed_tokens,
    }


def _simulate(
    rows: Plan,
    num_prompts: int,
    plan: PlanSummary,
    form: RequestForm,
    answer: AnswerLength,
    team: EngineTeam,
    hardware: Hardware,
) -> Prediction:
    """Simulate every partition, and a few of them with other settings. Each row has `num_prompts` prompts."""
    config, shape, kv_bytes = hardware.resolve(team.engine), hardware.shape, hardware.kv_bytes(team.engine)

    def simulate(config: EngineConfig, kv_bytes: int, first_partition: int, num_partitions: int) -> SimulationSummary:
        start, end = np.searchsorted(rows.partition, [first_partition, first_partition + num_partitions])
        chosen = rows.take(np.arange(start, end))
        return hardware.simulate(form.ask(chosen), chosen.groups(), config, kv_bytes)

    found = predict(lambda partition: simulate(config, kv_bytes, partition, 1), plan, team.num_engines)
    run = found.simulated
    layout, block_bytes = shape.kv_layout(config), shape.kv_block_bytes(config)
    num_blocks = kv_bytes // block_bytes // len(layout.windows)
    requests = form.ask(rows)
    oversized = find_oversized(requests, config.block_size, num_blocks)
    return Prediction(
        device=hardware.device,
        dtype=hardware.dtype,
        weight_bytes=shape.weight_bytes,
        kv=KVMemory(
            budget_bytes=kv_bytes,
            peak_bytes=run.peak_kv_blocks * block_bytes,
            bytes_per_token={
                window: count * shape.kv_bytes_per_layer for window, count in shape.layers_by_window.items()
            },
        ),
        answer=answer,
        num_oversized_rows=len({rows.row_id[index] // num_prompts for index in oversized}),
        num_oversized_tokens=sum(len(requests[index].token_ids) for index in oversized),
        num_engines=team.num_engines,
        seconds=found.seconds,
        run=run,
        what_ifs=try_settings(simulate, config, kv_bytes, hardware.free_bytes, run, found.partition_seconds),
    )


def read_all_rows(plan: ArtifactRef) -> Plan:
    """The whole plan in memory; `ArtifactError` where the file is not what its reference says."""
    with open_parquet(plan) as file:
        return plan_of_rows(file.read())
