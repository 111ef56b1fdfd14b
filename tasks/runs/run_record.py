"""The record of a run, kept from its start, and its summary, made when its answers are written."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from secrets import token_hex
from typing import Any, Literal

from prefect.artifacts import create_table_artifact

from tasks.workloads.workload import Workload

LOGGER = logging.getLogger("batchloom")

PACKAGES = ("batchloom", "torch", "transformers", "duckdb", "pyarrow", "prefect")
"""Packages whose versions a run's record holds."""

RunStatus = Literal["running", "completed", "interrupted", "failed", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The columns of the table ``runs`` that do not come from the rows.

    Attributes:
        run_id: one for each workload of a flow run.
        workload: its name.
        workload_source: the argument of `load_workload`.
        workload_digest: of prompt, decoding and labels.
        model: as the user named it.
        model_digest: of the checkpoint.
        started_at: ISO 8601 with an offset.
        status: "running" until the answers are written.
        error: why a run failed or was interrupted; empty otherwise.
        num_already_done: rows that an earlier run had answered.
        seconds: stage (read, tokenize, plan, infer) to wall seconds; the write measures itself.
        token_saving_ratio: of the plan, Eq. 2 of BatchLLM, 0 to 1; None before there is a plan.
        best_token_saving_ratio: the best that any sharing of prefixes could reach.
        shared_with: workloads that were planned together with this one, to the prompt tokens shared with each.
        config: settings of engine and flow, JSON values.
        versions: package to version.
    """

    run_id: str
    workload: str
    workload_source: str
    workload_digest: str
    model: str
    model_digest: str
    started_at: str
    status: RunStatus = "running"
    error: str = ""
    num_already_done: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    token_saving_ratio: float | None = None
    best_token_saving_ratio: float | None = None
    shared_with: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, workload: Workload, model: str, model_digest: str, config: Mapping[str, Any]) -> "RunRecord":
        """The record of a run that starts now. See `RunRecord`."""
        return cls(
            run_id=new_run_id(workload.name),
            workload=workload.name,
            workload_source=workload.source,
            workload_digest=workload.digest,
            model=model,
            model_digest=model_digest,
            started_at=datetime.now(UTC).isoformat(),
            config=config,
            versions={"python": python_version()} | {name: found for name in PACKAGES if (found := _version(name))},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The counts of a run.

    Attributes:
        num_rows: rows without an answer when the run began: the sum of num_ok, num_errors and num_unanswered.
        num_unanswered: rows without answer or error; a later run answers them.
        num_already_done: rows that earlier runs had answered.
        num_prompt_tokens: of rows that went through the model, as are cached and output tokens.
        num_cached_tokens: prompt tokens that were not computed again, because another row shares them.
        best_token_saving_ratio: the best that any sharing could reach; None if planned together with other workloads.
        infer_seconds: wall time, loading the model included.
    """

    run_id: str
    workload: str
    status: RunStatus
    num_rows: int
    num_ok: int
    num_errors: int
    num_unanswered: int
    num_already_done: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    best_token_saving_ratio: float | None
    infer_seconds: float

    @property
    def text(self) -> str:
        """The summary as a line of the log."""
        if self.num_rows == 0:
            return f"{self.workload}: nothing new to do; {self.num_already_done:,} rows were answered before"
        parts = [f"{self.num_ok:,} rows answered", f"{self.num_errors:,} failed"]
        if self.num_unanswered:
            parts.append(f"{self.num_unanswered:,} left for the next run")
        parts.append(f"{self.num_already_done:,} answered before")
        if self.num_prompt_tokens:
            best = "" if (ratio := self.best_token_saving_ratio) is None else f" (at best {ratio:.1%})"
            saved = f"{self.num_cached_tokens / self.num_prompt_tokens:.1%} of {self.num_prompt_tokens:,} prompt tokens"
            parts.append(f"{saved} saved{best}")
        if self.num_prompt_tokens and self.infer_seconds:
            rate = (self.num_prompt_tokens + self.num_output_tokens) / self.infer_seconds
            parts.append(f"{rate:,.0f} tokens/s for {self.infer_seconds:,.0f} s")
        return f"{self.workload}: {self.status}: {', '.join(parts)}"


def new_run_id(workload: str) -> str:
    """A unique run id that sorts by start and names the workload."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{workload}-{token_hex(3)}"


def artifact_key(kind: str, name: str) -> str:
    """A key for a Prefect artifact: lower case letters, digits and hyphens."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'workload'}"


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
            "answered before": summary.num_already_done,
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


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
