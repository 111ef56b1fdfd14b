"""The console script `batchloom`. What takes seconds to import is imported when a command runs."""

import gc
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from flows.command.commands import COMMANDS, HELP_FLAGS, MODULES, OF_NIGHT_FILES
from flows.command.failure import EXIT_USAGE, fail


def batchloom(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the exit code.

    Before and after a flow, Ctrl-C ends the process at once: there is nothing to keep, and a traceback would tell
    nothing.
    """
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if (text := " ".join(given)).encode(errors="ignore").decode() != text:
        return fail(f"batchloom: names must be UTF-8, got {text!a}", EXIT_USAGE)
    if arguments is None:  # the process is ours: of the many objects that imports make, hardly any is garbage
        gc.set_threshold(50_000, 10, 10)
        if given[0] in (*HELP_FLAGS, "--version"):  # a reader such as `head` may have read enough
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a shell's background job
    if is_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return _run(*given)
    finally:
        if is_usual and arguments is not None:  # called from Python, so the process goes on
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(name: str, *given: str) -> int:
    if name in COMMANDS:
        return _run_command(name, list(given))
    if name == "--version":
        from importlib.metadata import version

        print(f"batchloom {version('batchloom')}")
    elif name in HELP_FLAGS:
        print("Usage: batchloom COMMAND [OPTIONS]\n")
        print("\n".join(f"  {command:9}  {meaning}" for command, meaning in COMMANDS.items()))
        print("\nbatchloom COMMAND --help shows its options, batchloom --version the version.")
    else:
        return fail(f"batchloom: no command {name!r}; there are {', '.join(COMMANDS)}", EXIT_USAGE)
    return 0


def _run_command(name: str, arguments: list[str]) -> int:
    from flows.command.prefect_server import temporary_server
    from flows.command.run_flow import run_flow

    is_file = arguments[:1] != [] and arguments[0].endswith(".toml")
    needs_server = name not in ("report", "check", "advise") and not set(HELP_FLAGS) & set(arguments)
    with temporary_server() if needs_server else nullcontext():  # starts while the flow is imported
        module, function = MODULES.get(name, f"flows.{name}"), name
        if is_file and name in OF_NIGHT_FILES:
            module, function = OF_NIGHT_FILES[name]
        return run_flow(getattr(import_module(module), function), arguments)


if __name__ == "__main__":
    sys.exit(batchloom())
