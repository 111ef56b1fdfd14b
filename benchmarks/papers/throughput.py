"""Requests per second in BatchLLM's case studies (Table 1): one engine with a server's policies and with ours."""

from collections.abc import Mapping, Sequence

from benchmarks.papers.case_workload import CASE_1, CASE_2, Case
from benchmarks.papers.configurations import OURS, SERVERS, Settings, describe, simulated_config
from benchmarks.papers.lab import Lab, Trial
from benchmarks.papers.simulated import A100, MI250, Place
from benchmarks.papers.table import Cell, Plot, Table

PAPER: Mapping[str, Sequence[float]] = {
    "case 1": (7.13, 9.9, 7.08, 9.83, 12.85, 12.85),
    "case 2": (4.34, 4.41, 4.56, 5.88, 8.65, 8.65),
}
"""Requests per second in the order of the configurations; the paper has no path sharing."""

COLUMNS = ("case", "policies", "configuration", "paper, over the best server", "requests/s", "over the best server")
POLICIES: Mapping[str, Settings] = {**SERVERS, **OURS}
SCALE, NUM_REQUESTS, CHUNK_TOKENS, KV_TOKENS = 0.125, 32, 256, 2560
NUM_REPEATS = 3


def simulated_throughput() -> Table:
    """Both cases at full size on the paper's class of device."""
    places: Sequence[tuple[Case, Place]] = ((CASE_1, A100), (CASE_2, MI250))
    rates = {
        case.name: {
            name: place.run(case.requests(), simulated_config(settings)).requests_per_second
            for name, settings in POLICIES.items()
        }
        for case, place in places
    }
    where = "; ".join(
        f"{case.name} ({case.num_requests:,} requests) with {place.model}'s shape in bfloat16 on {place.title}"
        for case, place in places
    )
    return _table(f"simulated: {where}; rows shuffled", rates)


def measured_throughput(lab: Lab) -> Table:
    """Both cases with lengths scaled down, on the processor."""
    rates = {}
    for case in (CASE_1, CASE_2):
        requests = case.scaled(SCALE, NUM_REQUESTS).requests(vocab_size=lab.vocab_size)
        trials = {
            name: Trial(settings=_scaled(settings), kv_tokens=KV_TOKENS, requests=requests)
            for name, settings in POLICIES.items()
        }
        runs = lab.measure(trials, num_repeats=NUM_REPEATS)
        rates[case.name] = {name: len(requests) / run.seconds for name, run in runs.items()}
    method = (
        f"{lab.text}; {NUM_REQUESTS} requests of each case, lengths times {SCALE}, rows shuffled, KV memory for "
        f"{KV_TOKENS:,} tokens, {CHUNK_TOKENS} tokens a step, medians of {NUM_REPEATS} interleaved runs"
    )
    return _table(method, rates)


def _scaled(settings: Settings) -> Settings:
    """Steps and the cap on requests in proportion to the lengths and to the memory."""
    scaled = {**settings, "max_num_batched_tokens": CHUNK_TOKENS * (4 if settings.get("prefill") == "whole" else 1)}
    return scaled | ({"max_running_requests": 32} if "max_running_requests" in settings else {})


def _table(method: str, rates: Mapping[str, Mapping[str, float]]) -> Table:
    rows: list[list[Cell]] = []
    for case, found in rates.items():
        best, paper_best = max(found[name] for name in SERVERS), max(PAPER[case][: len(SERVERS)])
        rows += [
            [
                case, name, describe(POLICIES[name]), round(paper / paper_best, 2), round(rate, 2),
                round(rate / best, 2),
            ]
            for (name, rate), paper in zip(found.items(), PAPER[case], strict=True)
        ]  # fmt: skip
    return Table(
        method=method,
        columns=COLUMNS,
        rows=rows,
        plots=[
            Plot(
                slug="throughput",
                title="Requests per second by policies",
                kind="bars",
                labels=["requests/s"],
                series={case: dict(found) for case, found in rates.items()},
            )
        ],
    )
