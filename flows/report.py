"""The page of a run: ``python -m flows.report --database X [--run RUN_ID] [--out page.html]``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import BatchloomError
from flows.cli import EXIT_FAILED
from tasks.report import report, write_report
from tasks.storage.artifact import ArtifactRef

LOGGER = logging.getLogger("batchloom")


def report_run(database: str | Path, run_id: str, plan: ArtifactRef | None) -> None:
    """Write the page of a run that is in the database, and link it from the flow run that calls this.

    A page that cannot be made is a failed task and a warning, never the end of a night: the answers are in the tables.

    Args:
        run_id: of a run in the database.
        plan: the run's plan artifact; None is what the run's manifest names.
    """
    state = report(str(database), run_id, plan, return_state=True)
    if state.is_completed():
        LOGGER.info("report: %s", state.result())
    else:
        LOGGER.warning("run %s has no report: %s", run_id, state.message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page with the options in `arguments` (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.report", description="Write the page of a run: one HTML file that needs nothing else."
    )
    parser.add_argument("--database", type=Path, required=True, help="DuckDB file")
    parser.add_argument("--run", metavar="RUN_ID", help="of the table runs (default: the newest)")
    parser.add_argument(
        "--out", type=Path, metavar="PAGE", help="file to write (default: report.html in the run's folder)"
    )
    parser.add_argument(
        "--lock-timeout-seconds",
        type=float,
        default=30.0,
        metavar="VALUE",
        help="to wait for a locked database (default: 30)",
    )
    options = parser.parse_args(arguments)
    try:
        path, _ = write_report(
            options.database, options.run, options.out, lock_timeout_seconds=options.lock_timeout_seconds
        )
    except BatchloomError as error:
        print(f"report: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
