"""Token saving ratio: implicit caching, explicit grouping, and the upper bound (BatchLLM 6.3.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.papers.case_workload import CASE_1
from benchmarks.papers.configurations import SERVER, Settings, describe, simulated_config
from benchmarks.papers.simulated import A100
from benchmarks.papers.table import Cell, Plot, Table
from engine.planning.planner import PlanMethod, plan_prompts
from engine.request import Request

RUNS: Sequence[tuple[str, Settings, bool, str]] = (
    ("LRU, rows shuffled", {**SERVER, "sharing": "lru"}, True, "44.2 %"),
    ("LRU, rows by document", {**SERVER, "sharing": "lru"}, False, ""),
    ("explicit, single level", {"sharing": "group"}, True, "54.9 %"),
    ("explicit, path", {"sharing": "path"}, True, ""),
)


def saving() -> Table:
    """The scheduler's counts for simulated runs, the plan's counts for plans."""
    rows = [*_simulated(), *_planned(CASE_1.requests())]
    return Table(
        method=f"{A100.text}; case 1 at full length ({CASE_1.num_requests:,} requests)",
        columns=("what", "configuration", "paper", "token saving ratio"),
        rows=[[*row[:3], f"{row[3]:.1%}"] for row in rows],
        plots=[
            Plot(
                slug="saving",
                title="Prompt tokens saved in case 1",
                kind="bars",
                labels=["percent"],
                series={
                    str(name): {
                        "this engine": 100 * float(ratio),
                        **({"the paper": float(str(paper).removesuffix(" %"))} if paper else {}),
                    }
                    for name, _, paper, ratio in rows
                },
            )
        ],
    )


def _simulated() -> Iterator[list[Cell]]:
    for name, settings, is_shuffled, paper in RUNS:
        run = A100.run(CASE_1.requests(is_shuffled=is_shuffled), simulated_config(settings))
        yield [name, describe(settings), paper, round(run.token_saving_ratio, 4)]


def _planned(requests: Sequence[Request]) -> Iterator[list[Cell]]:
    prompts = [request.token_ids for request in requests]
    methods: tuple[PlanMethod, ...] = ("paper", "exact")
    for method in methods:
        plan, found = plan_prompts(prompts, method=method)
        name = {"paper": "plan: Algorithm 1", "exact": "plan: exact single level"}[method]
        yield [name, f'`plan_prefix_groups(method="{method}")`', "54.9 %", round(found.token_saving_ratio, 4)]
    num_common = plan.num_common_block_tokens(simulated_config({}).block_size)
    path = replace(found, num_processed_tokens=found.num_processed_tokens - num_common)
    yield ["plan: path", "`Plan.num_common_block_tokens`", "", round(path.token_saving_ratio, 4)]
    yield ["optimum", "every beginning once", "56 %", round(found.best_token_saving_ratio, 4)]
