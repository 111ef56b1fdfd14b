"""``batchloom report --database X [--run RUN_ID] [--out page.html]``: writes the report of a run."""

import logging
import sys
from pathlib import Path

from engine.errors import ArtifactError
from flows.command.run_flow import plain_log, run_flow
from tasks.report import link_report, write_report

LOGGER = logging.getLogger("batchloom")


def report_run(database: str | Path, run_id: str, lock_timeout_seconds: float = 30.0) -> None:
    """Write the report of a run and link it from the calling flow run. An error is a failed task and a warning, but
    does not fail the night: the answers are in the tables. See `write_report`."""
    state = link_report(str(database), run_id, lock_timeout_seconds, return_state=True)
    if state.is_completed():
        LOGGER.info("report: %s", state.result())
    else:
        LOGGER.warning("run %s has no report: %s", run_id, state.message)


def report(database: Path, run: str = "", out: Path | None = None, lock_timeout_seconds: float = 30.0) -> int:
    """Write the report of a run and print its path.

    Args:
        database: DuckDB file
        run: run_id in the table runs (default: the newest that had work)
        out: file to write (default: report.html in the run's folder)
        lock_timeout_seconds: seconds to wait while another process has the database open
    """
    try:
        with plain_log(sys.stderr):
            path, _ = write_report(database, run or None, out, lock_timeout_seconds=lock_timeout_seconds)
    except ArtifactError as error:
        if out is not None:
            raise
        raise ArtifactError(f"{error}; name another file with --out") from error
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(run_flow(report))
