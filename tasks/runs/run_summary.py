"""The summary of a run, made when its answers are written."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from prefect.artifacts import create_table_artifact

from tasks.runs.run_record import NEEDS_FULL, RunStatus

LOGGER = logging.getLogger("batchloom")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The counts of a run.

    Attributes:
        is_full: it was to answer all rows again.
        num_rows: rows to answer when the run began: the sum of num_ok, num_errors and num_unanswered.
        num_unanswered: rows without answer or error; a later run answers them, see `NEEDS_FULL`.
        num_already_done: rows that earlier runs had done, rows that failed for good among them.
        num_prompt_tokens: of rows that went through the model, as are cached and output tokens.
        num_cached_tokens: prompt tokens that were not computed again, because another row shares them.
        best_token_saving_ratio: the best that any sharing could reach; None if planned together with other workloads.
        tokens_per_second: prompt and output tokens; None if nothing was inferred, or planned together with others.
        infer_seconds: wall time, loading the model included.
    """

    run_id: str
    workload: str
    status: RunStatus
    is_full: bool
    num_rows: int
    num_ok: int
    num_errors: int
    num_unanswered: int
    num_already_done: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    best_token_saving_ratio: float | None
    tokens_per_second: float | None
    infer_seconds: float

    @property
    def text(self) -> str:
        """The summary as a line of the log."""
        if not (self.num_rows or self.num_already_done):
            return f"{self.workload}: nothing to do; it has no rows"
        if self.num_rows == 0:
            return f"{self.workload}: nothing new to do; {self.num_already_done:,} rows were done before"
        parts = [f"{self.num_ok:,} rows answered", f"{self.num_errors:,} failed"]
        if self.num_unanswered:
            parts.append(f"{self.num_unanswered:,} left for the next run{NEEDS_FULL if self.is_full else ''}")
        parts.append(f"{self.num_already_done:,} done before")
        if self.num_prompt_tokens:
            saved, best = self.num_cached_tokens / self.num_prompt_tokens, self.best_token_saving_ratio
            most = "" if best is None else f" (at best {best:.1%}{' for all rows anew' if saved > best + 1e-9 else ''})"
            parts.append(f"{saved:.1%} of {self.num_prompt_tokens:,} prompt tokens saved{most}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s for {self.infer_seconds:,.0f} s")
        return f"{self.workload}: {self.status}: {', '.join(parts)}"


def show_summaries(summaries: Sequence[RunSummary]) -> None:
    """Show the night in Prefect as a table with a row for each workload."""
    rows = [
        {
            "workload": summary.workload,
            "status": summary.status,
            "rows": summary.num_rows,
            "answered": summary.num_ok,
            "failed": summary.num_errors,
            "left": summary.num_unanswered,
            "done before": summary.num_already_done,
            "prompt tokens": summary.num_prompt_tokens,
            "saved tokens": summary.num_cached_tokens,
            "inference seconds": round(summary.infer_seconds, 1),
            "run": summary.run_id,
        }
        for summary in summaries
    ]
    try:
        create_table_artifact(rows, key="nightly-runs", description="What the night did, workload by workload")
    except Exception as error:
        LOGGER.warning("the night has no table in Prefect: %s", error)


def artifact_key(kind: str, name: str) -> str:
    """A key for a Prefect artifact: lower case letters, digits and hyphens."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'workload'}"
