"""The command `batchloom`: runs its subcommands, prints an error as one line, sets the exit code."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Any, NoReturn, TextIO

from httpx import HTTPError
from prefect import Flow
from prefect.logging.handlers import PrefectConsoleHandler

from engine.errors import BatchloomError, ConfigError
from flows.options import HELP_FLAGS, parse_options
from flows.prefect_server import reachable_server, temporary_server

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

COMMANDS = {
    "nightly": "Answer the rows of a database that have no answer yet. batchloom nightly NIGHT.toml runs a night file.",
    "explain": "Predict what the nightly flow would do and how long it would take, without loading the model.",
    "evaluate": "Compare answers with gold rows or another run: accuracy, F1, nDCG, calibration, with intervals.",
    "calibrate": "Fit probabilities to gold rows, so that answers given with 90% are right nine times in ten.",
    "compare": "Answer a sample of rows with two prompts and show which answers change.",
    "check": "Find the errors of a night file, in seconds, without loading a model.",
    "advise": "Show how many tokens the order of a prompt's fields and instructions costs, and the best order.",
    "report": "Write the report of a run: one HTML file that needs no other file.",
    "demo": "Run the nightly flow on a demo database and show its results.",
}
FLAGS = {"explain": {"json": "print JSON instead of a page"}}
"""By command, options that are no parameters of its flow, with their help texts."""

MODULES = {
    "check": "flows.nights.check",
    **{name: f"flows.quality.{name}" for name in ("evaluate", "compare", "calibrate")},
}
"""By command, the module if it is not `flows.COMMAND`."""


def batchloom(arguments: Sequence[str] | None = None) -> int:
    """The console script: runs the command that the first argument names; returns the exit code."""
    name, *arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        is_file = name == "nightly" and arguments[:1] != [] and arguments[0].endswith(".toml")
        needs_server = name not in ("report", "check", "advise") and not set(HELP_FLAGS) & set(arguments)
        with temporary_server() if needs_server else nullcontext():  # starts while the flow is imported
            if is_file:
                return main(import_module("flows.nights.night").night, ["--file", *arguments])
            if name == "compare" and arguments[:1] != [] and not arguments[0].startswith("-"):
                arguments = ["--workload", *arguments]
            module = import_module(MODULES.get(name, f"flows.{name}"))
            flow = getattr(module, name, None)
            return main(flow, arguments) if isinstance(flow, Flow) else int(module.main(arguments))
    if name == "--version":
        print(f"batchloom {version('batchloom')}")
    elif name in HELP_FLAGS:
        print("Usage: batchloom COMMAND [OPTIONS]\n")
        print("\n".join(f"  {command:9}  {meaning}" for command, meaning in COMMANDS.items()))
        print("\nbatchloom COMMAND --help shows its options, batchloom --version the version.")
    else:
        return _fail("batchloom", f"no command {name!r}; there are {', '.join(COMMANDS)}", EXIT_USAGE)
    return 0


def main(flow: Flow[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run a flow with the options in `arguments` (the process's own if None); returns the exit code."""
    name, is_explain = flow.name, flow.name == "explain"
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = parse_options(flow, arguments, COMMANDS[name], FLAGS.get(name, {}))
    except ConfigError as error:
        return _fail(name, str(error), EXIT_USAGE)
    if options is None:
        return 0
    is_json = options.pop("json", False)
    atexit.register(end_quietly)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with plain_log(sys.stderr if is_explain else sys.stdout), reachable_server():
            result = flow(**options)
    except (BatchloomError, OSError) as error:
        return _fail(name, " ".join(str(error).split()), EXIT_FAILED)
    except HTTPError as error:
        return _fail(name, f"the Prefect server does not answer any more: {error}", EXIT_FAILED)
    except KeyboardInterrupt:
        rest = "; what is answered is kept, and the next run does the rest" if name == "nightly" else ""
        return _fail(name, f"stopped{rest}", EXIT_INTERRUPTED)
    if is_explain:
        from flows.explain_page import print_forecasts

        print_forecasts(result, is_json=is_json)
    return 0


@contextmanager
def plain_log(stream: TextIO) -> Iterator[None]:
    """Write batchloom's log to `stream` as plain lines; hide Prefect's unless PREFECT_LOGGING_LEVEL is set."""
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        consoles = [each for each in logging.getLogger().handlers if isinstance(each, PrefectConsoleHandler)]
        for other in (*consoles, *logging.getLogger("prefect._internal").handlers):
            other.setLevel(logging.CRITICAL)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("batchloom")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def prepare_console() -> None:
    """Show batchloom's messages, `survive_closed_console`, and `end_quietly` if Prefect has started the process."""
    logging.getLogger("batchloom").setLevel(logging.INFO)
    survive_closed_console()
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        atexit.register(end_quietly)


def survive_closed_console() -> None:
    """Keep a night alive if nobody reads its console any more, as when the worker of its deployment dies.

    rich ends the process when a line cannot be printed; this makes it stop printing instead.
    """
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, PrefectConsoleHandler):
                console = handler.console
                console.on_broken_pipe = partial(setattr, console, "quiet", True)  # type: ignore[method-assign]


def end_quietly() -> None:
    """Skip the last garbage collection, which takes two seconds, and hide DuckDB's report of objects still alive."""
    gc.freeze()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """On SIGTERM exit by an exception, so that context managers and exit handlers run."""
    sys.exit(EXIT_TERMINATED)


def _fail(command: str, message: str, code: int) -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return code
