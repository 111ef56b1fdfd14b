"""Workloads with rows that may end the process that tries them: the next run's engine has a process of its own.

There such rows are found as others that fail are; in the flow's own process they end each night at the same place.
"""

from pathlib import Path

from tasks.runs.run_folder import runs_folder


def is_guarded(database: str | Path, workload: str) -> bool:
    """Whether an earlier run of the workload ended while it tried rows, and none has come through without since."""
    return _mark(database, workload).exists()


def guard(database: str | Path, workload: str, *, is_needed: bool) -> None:
    """Say whether the next run of the workload needs it."""
    if is_needed:
        _mark(database, workload).touch(mode=0o600)
    else:
        _mark(database, workload).unlink(missing_ok=True)


def _mark(database: str | Path, workload: str) -> Path:
    return runs_folder(database) / f"guarded-{workload}"
