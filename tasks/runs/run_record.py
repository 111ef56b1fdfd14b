"""What is known of a run: its record, from its start, and its summary, once it is written."""

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
"""Whose versions a run's record names."""

RunStatus = Literal["running", "completed", "interrupted", "failed", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the table ``runs`` says of a run, apart from the counts that SQL takes from the rows.

    Attributes:
        run_id: one per flow run and workload.
        workload: its name.
        workload_source: what `load_workload` takes.
        workload_digest: of prompt, decoding and labels.
        model: as the user named it.
        model_digest: of the checkpoint.
        started_at: ISO 8601 with an offset.
        status: "running" until the answers are written.
        error: why a run failed or was interrupted; empty otherwise.
        num_already_done: rows that an earlier run had answered.
        seconds: stage (read, tokenize, plan, infer) to wall seconds; the write measures itself.
        token_saving_ratio: of the plan, Eq. 2 of BatchLLM, 0 to 1; None before there is a plan.
        best_token_saving_ratio: the best that any sharing could reach.
        shared_with: workload that was planned together with this one, to the prompt tokens that both have in common.
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
    """What a run did.

    Attributes:
        num_rows: rows that had no answer when it began; of these ok, errors and unanswered are parts.
        num_unanswered: neither answered nor an error: the run was interrupted; a later run takes them up.
        num_already_done: rows that earlier runs had answered.
        num_prompt_tokens: of the rows that went through the model; so for cached and output tokens.
        num_cached_tokens: prompt tokens that were not computed, because another row had them computed.
        best_token_saving_ratio: of the prompt tokens, what no sharing could exceed; None where none were planned alone.
        infer_seconds: of wall time, loading the model included.
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
        """One line for people."""
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
    """A run id that sorts by start, names its workload, and is never given twice."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{workload}-{token_hex(3)}"


def artifact_key(kind: str, name: str) -> str:
    """A key as Prefect takes it: lower case letters, digits and hyphens."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'workload'}"


def show_summaries(summaries: Sequence[RunSummary]) -> None:
    """A table artifact of the night: a row a workload."""
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
