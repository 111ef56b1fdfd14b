"""``batchloom report --database X [--run RUN_ID] [--out page.html]``: writes the report of a run."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ArtifactError, BatchloomError
from flows.command.commands import COMMANDS
from flows.command.failure import EXIT_FAILED, fail
from flows.command.run_flow import plain_log
from tasks.recover import recover_runs
from tasks.report import report, write_report

LOGGER = logging.getLogger("batchloom")


def report_run(database: str | Path, run_id: str) -> None:
    """Write the report of a run and link it from the calling flow run. An error is a failed task and a warning, but
    does not fail the night: the answers are in the tables."""
    state = report(str(database), run_id, return_state=True)
    if state.is_completed():
        LOGGER.info("report: %s", state.result())
    else:
        LOGGER.warning("run %s has no report: %s", run_id, state.message)


def recover(database: Path) -> None:
    """`recover_runs`, then write the reports of the runs that it has ended."""
    for run in recover_runs(database):
        report_run(database, run.record.run_id)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report with the options in `arguments` (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(prog="batchloom report", description=COMMANDS["report"])
    parser.add_argument("--database", type=Path, required=True, help="DuckDB file")
    parser.add_argument("--run", metavar="RUN_ID", help="run_id in the table runs (default: the newest that had work)")
    parser.add_argument(
        "--out", type=Path, metavar="PAGE", help="file to write (default: report.html in the run's folder)"
    )
    parser.add_argument(
        "--lock-timeout-seconds",
        type=float,
        default=30.0,
        metavar="VALUE",
        help="seconds to wait while another process has the database open (default: 30)",
    )
    options = parser.parse_args(arguments)
    try:
        with plain_log(sys.stderr):
            path, _ = write_report(
                options.database, options.run, options.out, lock_timeout_seconds=options.lock_timeout_seconds
            )
    except BatchloomError as error:
        hint = "; name another file with --out" if isinstance(error, ArtifactError) and options.out is None else ""
        return fail(f"report: {' '.join(str(error).split())}{hint}", EXIT_FAILED)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
