"""Time of the global plan of a batch, and how it grows: ``python -m benchmarks.planner [--out FILE]``.

Workload: BatchLLM's case 1 (section 6.2.2), synthetic: each document of 1,100 tokens is shared by 7 requests, each with
400 tokens of its own; rows are in a seeded random order. Timed: from token ids in memory (Python lists or int32 arrays)
to the finished groups or columns, without making the input. Every plan is checked against the known structure of its
input before its time counts; a wrong plan ends the run with exit code 1 and no figures.

Goals: 3,000 requests, as Python lists, within 0.1 s (the paper's own script: 0.28 s, section 6.3.4); 100,000 requests
(150 M tokens), as arrays, within 15 s and 4 GB of resident memory, including the input; time linear in requests, except
for the logarithm of sorting.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.peak_memory import peak_resident_gb
from benchmarks.measuring.result_file import report
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from engine.planning.group import PrefixGroup
from engine.planning.plan import Plan, SharingStats
from engine.planning.planner import plan_prompts
from engine.planning.prefix_groups import plan_prefix_groups

SHARE_DEGREE, PREFIX_TOKENS, OWN_TOKENS, VOCAB_SIZE = 7, 1100, 400, 32_000
BLOCK_SIZE = 16
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts in random order: instruction (the same in all) + document + own part.

    Attributes:
        values: int32 ``[num_tokens]``; prompt i is ``values[offsets[i] : offsets[i + 1]]``.
        offsets: int64 ``[num_requests + 1]``.
        documents: int64 ``[num_requests]``, the document of each prompt.
        num_instruction_tokens: 0 to PREFIX_TOKENS - 1; the document has the rest of PREFIX_TOKENS.
    """

    values: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    num_instruction_tokens: int

    @property
    def num_documents(self) -> int:
        return int(self.documents.max()) + 1

    @property
    def expected_sharing(self) -> SharingStats:
        num_requests, num_repeats = len(self.documents), self.num_documents - 1
        num_processed = self.num_documents * PREFIX_TOKENS + num_requests * OWN_TOKENS
        return SharingStats(
            num_logical_tokens=num_requests * (PREFIX_TOKENS + OWN_TOKENS),
            num_processed_tokens=num_processed,
            num_best_tokens=num_processed - num_repeats * self.num_instruction_tokens,
        )

    def prompts(self) -> list[npt.NDArray[np.int32]]:
        return [self.values[start : start + PREFIX_TOKENS + OWN_TOKENS] for start in self.offsets[:-1].tolist()]


def make_batch(num_requests: int, *, num_instruction_tokens: int = 0, seed: int = 7) -> Batch:
    """Documents differ in their first token, and so do a document's own parts, so the shared prefixes are known."""
    rng = np.random.default_rng(seed)
    documents = np.empty(num_requests, dtype=np.int64)
    values = np.empty((num_requests, PREFIX_TOKENS + OWN_TOKENS), dtype=np.int32)
    instruction = rng.integers(0, VOCAB_SIZE, num_instruction_tokens, dtype=np.int32)
    shuffled = rng.permutation(num_requests)
    for document, first in enumerate(range(0, num_requests, SHARE_DEGREE)):
        rows = shuffled[first : first + SHARE_DEGREE]
        prefix = rng.integers(0, VOCAB_SIZE, PREFIX_TOKENS, dtype=np.int32)
        prefix[:num_instruction_tokens] = instruction
        prefix[num_instruction_tokens] = document
        own = rng.integers(0, VOCAB_SIZE, (len(rows), OWN_TOKENS), dtype=np.int32)
        own[:, 0] = np.arange(len(rows))
        values[rows, :PREFIX_TOKENS] = prefix
        values[rows, PREFIX_TOKENS:] = own
        documents[rows] = document
    return Batch(
        values=values.reshape(-1),
        offsets=np.arange(num_requests + 1, dtype=np.int64) * (PREFIX_TOKENS + OWN_TOKENS),
        documents=documents,
        num_instruction_tokens=num_instruction_tokens,
    )


def check_plan(planned: tuple[Plan, SharingStats], batch: Batch) -> None:
    """The exact plan has one group per document, which shares all of it where it has two requests or more."""
    plan, sharing = planned
    documents = batch.documents[plan.row_id]
    pairs = np.unique(np.stack([documents, plan.group_id]), axis=1)
    num_groups = len(plan.group_starts)
    if num_groups != batch.num_documents or pairs.shape[1] != batch.num_documents:
        raise WrongAnswerError(f"{num_groups} groups, expected one for each of {batch.num_documents} documents")
    num_sharers = np.bincount(batch.documents)[documents]
    if not np.array_equal(plan.num_prefix_tokens, np.where(num_sharers > 1, PREFIX_TOKENS, 0)):
        raise WrongAnswerError(f"prefix lengths {np.unique(plan.num_prefix_tokens)}, expected {PREFIX_TOKENS}")
    if sharing != batch.expected_sharing:
        raise WrongAnswerError(f"{sharing}, expected {batch.expected_sharing}")


def check_groups(groups: Sequence[PrefixGroup], batch: Batch) -> None:
    """Every request is in the group of its document, and prefix + suffix is its prompt."""
    prompts = batch.prompts()
    seen = np.zeros(len(prompts), dtype=np.int64)
    for group in groups:
        for member in group.members:
            for index in member.request_indices:
                seen[index] += 1
                if not np.array_equal(np.concatenate([group.prefix, member.suffix]), prompts[index]):
                    raise WrongAnswerError(f"request {index}: prefix + suffix is not the prompt")
    if not (seen == 1).all() or len(groups) != batch.num_documents:
        raise WrongAnswerError(f"{len(groups)} groups, expected {batch.num_documents}; or a request lost or repeated")


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def measure_case_1(num_repeats: int) -> dict[str, Any]:
    """3,000 requests: median and best of repeated runs, by kind of input and method."""
    batch = make_batch(3000)
    arrays = batch.prompts()
    check_plan(plan_prompts(arrays), batch)
    results: dict[str, Any] = {"num_requests": 3000, "num_tokens": len(batch.values), "num_repeats": num_repeats}
    inputs: dict[str, list[Any]] = {"lists": [prompt.tolist() for prompt in arrays], "arrays": arrays}
    for name, sequences in inputs.items():
        for method in ("exact", "paper"):
            seconds = []
            for _ in range(num_repeats):
                groups, elapsed = timed(lambda s=sequences, m=method: plan_prefix_groups(s, method=m))  # type: ignore[misc]
                check_groups(groups, batch)
                seconds.append(elapsed)
            results[f"{name}_{method}_median_s"] = round(statistics.median(seconds), 4)
            results[f"{name}_{method}_best_s"] = round(min(seconds), 4)
    return results


def measure_two_levels() -> dict[str, Any]:
    """3,000 requests with one instruction of 100 tokens: savings of one level, and of blocks that groups share."""
    batch = make_batch(3000, num_instruction_tokens=100)
    plan, exact = plan_prompts(batch.prompts())
    check_plan((plan, exact), batch)
    groups, groups_s = timed(plan.groups)
    check_groups(groups, batch)
    num_common = plan.num_common_block_tokens(BLOCK_SIZE)
    if num_common != (batch.num_documents - 1) * (100 // BLOCK_SIZE * BLOCK_SIZE):
        raise WrongAnswerError(f"blocks in common save {num_common} tokens")
    _, paper = plan_prompts(batch.prompts(), method="paper")
    with_blocks = replace(exact, num_processed_tokens=exact.num_processed_tokens - num_common)
    return {
        "num_requests": 3000,
        "num_instruction_tokens": 100,
        "block_size": BLOCK_SIZE,
        "token_saving_ratio_paper": round(paper.token_saving_ratio, 4),
        "token_saving_ratio_exact": round(exact.token_saving_ratio, 4),
        "token_saving_ratio_exact_with_common_blocks": round(with_blocks.token_saving_ratio, 4),
        "best_token_saving_ratio": round(exact.best_token_saving_ratio, 4),
        "columns_to_groups_s": round(groups_s, 4),
    }


def measure_scale(num_requests: int) -> dict[str, Any]:
    """One batch in a process of its own: times of the first call, CPU time of later calls, peak resident memory."""
    batch = make_batch(num_requests)
    prompts = batch.prompts()
    planned, columns_s = timed(lambda: plan_prompts(prompts))
    groups, groups_s = timed(lambda: plan_prefix_groups(prompts))
    groups_cpu_s = []
    for _ in range(3):
        started = time.process_time()
        plan_prefix_groups(prompts)
        groups_cpu_s.append(time.process_time() - started)
    peak_gb = peak_resident_gb()
    check_plan(planned, batch)
    check_groups(groups, batch)
    return {
        "num_requests": num_requests,
        "num_tokens": len(batch.values),
        "input_gb": round(batch.values.nbytes / 1e9, 3),
        "columns_s": round(columns_s, 3),
        "groups_s": round(groups_s, 3),
        "groups_cpu_best_s": round(min(groups_cpu_s), 3),
        "peak_resident_gb": round(peak_gb, 3),
    }


@refuse_wrong_answers
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes, e.g. benchmarks/results/planner.json")
    parser.add_argument("--sizes", type=int, nargs="+", default=[25_000, 50_000, 100_000], help="requests, ascending")
    parser.add_argument("--repeats", type=int, default=9, help="of the 3,000-request case")
    arguments = parser.parse_args()
    machine = describe_machine()
    case_1 = measure_case_1(arguments.repeats)
    two_levels = measure_two_levels()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        scale = list(processes.map(measure_scale, arguments.sizes))
    first, last = scale[0], scale[-1]
    growth = (last["groups_cpu_best_s"] / first["groups_cpu_best_s"]) / (last["num_requests"] / first["num_requests"])
    report(
        "planner", None, arguments.out, machine=machine, versions={"numpy": version("numpy")},
        case_1=case_1, two_levels=two_levels, scale=scale, cpu_time_per_request_last_to_first_size=round(growth, 2),
        goals_met={
            "3,000 requests within 0.1 s": case_1["lists_exact_median_s"] <= 0.1,
            f"{last['num_requests']:,} requests within 15 s": last["groups_s"] <= 15,
            f"{last['num_requests']:,} requests within 4 GB": last["peak_resident_gb"] <= 4,
            "CPU time per request grows by less than half": growth < 1.5,
        },
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
