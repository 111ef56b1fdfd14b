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
