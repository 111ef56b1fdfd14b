"""Where the time went: stages, utilisation, the slowest groups, partitions and steps."""

from tasks.report_page.bars import Bar, draw_histogram, draw_rows
from tasks.report_page.chart import WIDE
from tasks.report_page.facts import RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.quantity import count, percent, seconds
from tasks.report_page.table import Table
from tasks.report_page.time_axis import engine_cell, engine_column, has_engines

STAGES = ("read", "tokenize", "plan", "infer", "write")


def draw_stages(facts: RunFacts) -> Figure:
    """Wall time of each stage of the flow."""
    known = {stage: value for stage in STAGES if (value := getattr(facts.run, f"{stage}_seconds")) is not None}
    rest = facts.run.total_seconds - sum(known.values())
    stages = [*known.items(), ("between stages", max(rest, 0.0))]
    total = sum(value for _, value in stages) or 1.0
    return Figure(
        slug="stages",
        title="Time per stage",
        note=f"{seconds(facts.run.total_seconds)} from begin to end; of infer, {seconds(facts.totals.elapsed_seconds)} "
        f"are steps of {'the engine that took longest' if has_engines(facts) else 'the model'}, the rest is loading it "
        "and writing parts.",
        chart=draw_rows(
            "stages",
            [
                Bar(name=stage, value=value, text=f"{seconds(value)} · {percent(value / total)}", kind="plain")
                for stage, value in stages
            ],
        ),
        statement="report/run",
        table=Table(
            caption="Wall time per stage",
            columns=("stage", "seconds", "share"),
            rows=[(stage, f"{value:,.3f}", percent(value / total)) for stage, value in stages],
        ),
    )


def draw_utilisation(facts: RunFacts) -> Figure:
    """How full the steps were, weighed by the time they took."""
    tenths = facts.utilisation
    ranges = [f"{each.tenth * 10} to {each.tenth * 10 + 10}%" for each in tenths]
    return Figure(
        slug="utilisation",
        title="Batch utilisation",
        note=f"Tokens of a step over the chunk size: {percent(facts.totals.utilisation)} in the mean, "
        f"{percent(facts.totals.tecd_utilisation)} without the cool-down of the run.",
        chart=draw_histogram(
            "utilisation",
            [
                Bar(
                    name=name,
                    value=each.seconds,
                    text=f"{name} full: {count(each.num_steps)} steps, {seconds(each.seconds)}",
                    kind="plain",
                    part=each.cool_down_seconds,
                )
                for name, each in zip(ranges, tenths, strict=True)
            ],
            [f"{edge * 10}%" for edge in range(11)],
            "tokens of the step / chunk size",
            "seconds",
            width=WIDE,
        ),
        legend=[("plain", "time in such steps"), ("quiet", "of it in a cool-down")],
        statement="report/utilisation",
        table=Table(
            caption="Steps by how full they were",
            columns=("full", "steps", "seconds", "in cool-down"),
            rows=[
                (name, count(each.num_steps), f"{each.seconds:,.2f}", f"{each.cool_down_seconds:,.2f}")
                for name, each in zip(ranges, tenths, strict=True)
            ],
        ),
    )


def draw_slowest_groups(facts: RunFacts) -> Figure:
    """The prefix groups that the model's time went to."""
    groups = facts.slow_groups
    return Figure(
        slug="slowest-groups",
        title="Slowest groups",
        note="Rows that share a prefix. A step's time is divided by the tokens that were computed for each row; a "
        "prefix counts for the first row that ran on it, which the example often is.",
        statement="report/slowest_groups",
        table=Table(
            caption=f"{len(groups)} of {count(groups[0].num_groups)} groups, dearest first",
            columns=(
                "dearest row",
                "time",
                "of all",
                "share degree",
                "prefix tokens",
                "rows",
                "prompt tokens",
                "of them computed",
                "output tokens",
            ),
            rows=[
                (
                    each.dearest_key,
                    seconds(each.seconds),
                    percent(each.share_of_time),
                    count(each.share_degree),
                    count(each.num_prefix_tokens),
                    count(each.num_rows),
                    count(each.num_prompt_tokens),
                    count(each.num_computed_prompt_tokens),
                    count(each.num_output_tokens),
                )
                for each in groups
            ],
        ),
    )


def draw_engines(facts: RunFacts) -> Figure:
    """What each of the engines that worked side by side did."""
    longest = max(each.seconds for each in facts.engines)
    return Figure(
        slug="engines",
        title="Engines",
        note="They work side by side, each on the next partition, so the run takes as long as the longest of them. "
        "Where the others have much less to do, smaller partitions (--partition-tokens) even it out.",
        statement="report/engines",
        table=Table(
            caption=f"{len(facts.engines)} engines",
            columns=(
                *("engine", "process", "partitions", "steps", "time of steps", "without cool-down", "of the longest"),
                *("tokens", "utilisation", "most KV blocks", "of all"),
            ),
            num_text_columns=2,
            rows=[
                (
                    str(each.engine),
                    each.worker,
                    count(each.num_partitions),
                    count(each.num_steps),
                    seconds(each.seconds),
                    seconds(each.tecd_seconds),
                    percent(each.seconds / longest if longest else None),
                    count(each.num_tokens),
                    percent(each.utilisation),
                    count(each.peak_kv_blocks),
                    count(each.num_kv_blocks_total),
                )
                for each in facts.engines
            ],
        ),
    )


def draw_slowest(facts: RunFacts) -> list[Figure]:
    """Tables of the groups, where their cost is known, the partitions and the steps that took longest."""
    partitions = Table(
        caption=f"{len(facts.partitions)} of {count(facts.totals.num_partitions)} partitions, longest first",
        columns=(
            "partition",
            "steps",
            "time",
            "in cool-down",
            "tokens",
            "tokens/s",
            "utilisation",
            "most KV blocks",
            "answered",
            "preempted",
        ),
        rows=[
            (
                str(each.partition),
                count(each.num_steps),
                seconds(each.seconds),
                seconds(each.cool_down_seconds),
                count(each.num_tokens),
                count(each.tokens_per_second),
                percent(each.utilisation),
                count(each.peak_kv_blocks),
                count(each.num_finished_requests),
                count(each.num_preempted_requests),
            )
            for each in facts.partitions
        ],
    )
    steps = Table(
        caption=f"{len(facts.slow_steps)} of {count(facts.totals.num_steps)} steps, longest first",
        columns=(
            "partition",
            "step",
            "began after",
            "time",
            "decode",
            "suffix",
            "prefix",
            "tokens/s",
            "running",
            "preempted",
            *engine_column(facts),
        ),
        num_text_columns=2,
        rows=[
            (
                str(each.partition),
                str(each.step),
                seconds(each.started_seconds),
                seconds(each.duration_ms / 1000),
                count(each.num_decode_tokens),
                count(each.num_suffix_tokens),
                count(each.num_prefix_tokens),
                count(each.tokens_per_second),
                count(each.num_running_requests),
                count(each.num_preempted_requests),
                *engine_cell(facts, each.engine),
            )
            for each in facts.slow_steps
        ],
    )
    return [
        *([draw_engines(facts)] if has_engines(facts) else []),
        *([draw_slowest_groups(facts)] if facts.slow_groups else []),
        Figure(
            slug="slowest-partitions",
            title="Slowest partitions",
            note="A partition is a unit of work whose answers are kept together; it holds whole prefix groups.",
            table=partitions,
            statement="report/slowest_partitions",
        ),
        Figure(
            slug="slowest-steps",
            title="Slowest steps",
            note="One pass of the model each. A slow step with few tokens waits for something else than arithmetic.",
            table=steps,
            statement="report/slowest_steps",
        ),
    ]
