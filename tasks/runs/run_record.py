"""The record of a run, kept from its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RunStatus = Literal["running", "completed", "interrupted", "failed", "deadline"]

NEEDS_FULL = " (rows answered before only with --full)"
"""Said of the rows that a run with `full` left: a run without it leaves those alone that have an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The columns of the table ``runs`` that do not come from the rows.

    Attributes:
        run_id: one for each workload of a flow run.
        workload_source: the argument of `load_workload`.
        workload_digest: of prompt, decoding and labels.
        model: as the user named it.
        started_at: ISO 8601 with an offset.
        status: "running" until the answers are written.
        error: why a run failed or was interrupted; empty otherwise.
        num_already_done: rows that an earlier run had done, rows that failed for good among them.
        seconds: stage (read, tokenize, plan, infer) to wall seconds; the write measures itself.
        token_saving_ratio: of the plan, Eq. 2 of BatchLLM, 0 to 1; None before there is a plan.
        best_token_saving_ratio: the best that any sharing of prefixes could reach.
        shared_with: workloads that were planned together with this one, to the prompt tokens shared with each.
        config: settings of engine and flow, JSON values.
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
