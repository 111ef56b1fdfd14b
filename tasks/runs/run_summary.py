"""What a run did, in numbers and in a line for people."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.runs.run_folder import RunRecord, RunStatus
from tasks.storage.artifact import ArtifactRef
from tasks.write import WriteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run did.

    Attributes:
        num_rows: rows that had no answer when it began; of these ok, errors and unanswered are parts.
        num_already_done: rows that earlier runs had answered.
        num_prompt_tokens: of the rows that went through the model; so for cached and output tokens.
        num_cached_tokens: prompt tokens that were not computed, because another row had them computed.
        best_token_saving_ratio: of the prompt tokens, what no sharing could exceed; None where nothing was planned.
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
        if self.num_prompt_tokens and self.best_token_saving_ratio is not None:
            saved = f"{self.num_cached_tokens / self.num_prompt_tokens:.1%} of {self.num_prompt_tokens:,} prompt tokens"
            parts.append(f"{saved} saved (at best {self.best_token_saving_ratio:.1%})")
        if self.num_prompt_tokens and self.infer_seconds:
            rate = (self.num_prompt_tokens + self.num_output_tokens) / self.infer_seconds
            parts.append(f"{rate:,.0f} tokens/s for {self.infer_seconds:,.0f} s")
        return f"{self.workload}: {self.status}: {', '.join(parts)}"


def summarise_run(record: RunRecord, written: WriteResult, parts: Sequence[ArtifactRef]) -> RunSummary:
    """The summary of a run that has just been written."""
    tables = [
        pq.read_table(part.path, columns=["num_prompt_tokens", "num_cached_tokens", "num_output_tokens"])
        for part in parts
    ]

    def total(column: str) -> int:
        return sum(pc.sum(table.column(column)).as_py() or 0 for table in tables)

    return RunSummary(
        run_id=record.run_id,
        workload=record.workload,
        status=record.status,
        num_rows=written.num_rows,
        num_ok=written.num_ok,
        num_errors=written.num_errors,
        num_unanswered=written.num_unanswered,
        num_already_done=record.num_already_done,
        num_prompt_tokens=total("num_prompt_tokens"),
        num_cached_tokens=total("num_cached_tokens"),
        num_output_tokens=total("num_output_tokens"),
        best_token_saving_ratio=record.best_token_saving_ratio,
        infer_seconds=record.seconds.get("infer", 0.0),
    )
