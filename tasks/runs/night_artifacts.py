"""What a night shows in Prefect's pages besides its log: how far it is, and a table of what came out."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact

from tasks.runs.run_record import RunSummary

LOGGER = logging.getLogger("batchloom")


def artifact_key(kind: str, name: str) -> str:
    """A key as Prefect takes it: lower case letters, digits and hyphens."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-') or 'workload'}"


def start_progress(workload: str, num_rows: int) -> Callable[[int], None]:
    """Make a progress bar at 0%; gives what moves it to so many rows. A night goes on where Prefect takes none."""
    artifact: UUID | None = None
    description = f"{workload}: {num_rows:,} rows to answer"
    try:
        key = artifact_key("progress", workload)
        artifact = cast("UUID", create_progress_artifact(0.0, key=key, description=description))
    except Exception as error:  # a server that is away for a moment
        LOGGER.warning("%s: no progress bar: %s", workload, error)

    def show(num_done: int) -> None:
        if artifact is not None:
            try:
                update_progress_artifact(artifact, progress=100.0 * min(1.0, num_done / max(1, num_rows)))
            except Exception as error:
                LOGGER.warning("%s: the progress bar stays where it is: %s", workload, error)

    return show


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
