"""How a command fails: its exit codes, and the line that says why."""

import sys

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def fail(message: str, code: int) -> int:
    """Print why a command failed, as one line; returns the exit code."""
    print(message, file=sys.stderr)
    return code


def describe_lost_server(error: Exception, what: str = "the Prefect server does not answer any more") -> str:
    """What happened to Prefect's server and why; of a temporary one, where its database is, whose disk may be full."""
    from prefect.settings import PREFECT_HOME

    from flows.command.prefect_server import CONFIGURED_URL
    from tasks.database.messages import describe_free_space

    reason = " ".join(str(error).split()).partition(" For more information check:")[0].rstrip("- ")
    line = f"{what}: {reason}"
    home = PREFECT_HOME.value()
    return line if CONFIGURED_URL else f"{line}; its database is in {home}{describe_free_space(home / 'prefect.db')}"
