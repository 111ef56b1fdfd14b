"""The command `batchloom`: its commands, one line for an error, exit codes."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import version
from types import FrameType
from typing import Any, NoReturn, TextIO

from httpx import HTTPError
from prefect import Flow
from prefect.logging.handlers import PrefectConsoleHandler

from engine.errors import BatchloomError, ConfigError
from flows.options import HELP_FLAGS, parse_options
from flows.prefect_server import quiet_prefect, temporary_server

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

COMMANDS = {
    "nightly": "Answer the rows of a database that have no answer yet, with a language model, into its tables.",
    "explain": "Say what the nightly flow would do and how long it would take, without loading the model.",
    "evaluate": "Compare answers with gold rows or another run: accuracy, F1, nDCG, calibration, with intervals.",
    "calibrate": "Fit probabilities to gold rows, so that what is 90% sure is right nine times in ten.",
    "compare": "Show what changes where one workload's prompt takes the place of another's, on a sample of rows.",
    "check": "Find what is wrong with a night file, in seconds, without loading a model.",
    "advise": "Show what the order of fields and instructions costs, and the best that a template allows.",
    "report": "Write the page of a run: one HTML file that needs nothing else.",
    "demo": "Run the nightly flow on a database of its own, and show what came out.",
}
FLOWS = ("nightly", "explain", "evaluate", "compare", "calibrate")
"""The commands that are flows."""

FLAGS = {"explain": {"json": "print JSON instead of a page"}}
"""What a command takes beside its flow's parameters."""

MODULES = {
    "check": "flows.nights.check",
    **{name: f"flows.quality.{name}" for name in ("evaluate", "compare", "calibrate")},
}
"""Of the commands whose module has another name."""


def batchloom(arguments: Sequence[str] | None = None) -> int:
    """The console script: the first argument is one of `COMMANDS`; returns the exit code."""
    name, *arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        is_file = name == "nightly" and arguments[:1] != [] and arguments[0].endswith(".toml")
        needs_server = name not in ("report", "check", "advise") and not set(HELP_FLAGS) & set(arguments)
        with temporary_server() if needs_server else nullcontext():  # it starts while the flow is imported
            if is_file:
                return main(import_module("flows.nights.night").night, ["--file", *arguments])
            if name == "compare" and arguments[:1] != [] and not arguments[0].startswith("-"):
                arguments = ["--workload", *arguments]
            module = import_module(MODULES.get(name, f"flows.{name}"))
            return main(getattr(module, name), arguments) if name in FLOWS else int(module.main(arguments))
    if name == "--version":
        print(f"batchloom {version('batchloom')}")
    elif name in HELP_FLAGS:
        print("Usage: batchloom COMMAND [OPTIONS]\n")
        print("\n".join(f"  {command:8}  {meaning}" for command, meaning in COMMANDS.items()))
        print("\nbatchloom COMMAND --help shows its options, batchloom --version the version.")
    else:
        return _fail("batchloom", f"no command {name!r}; there are {', '.join(COMMANDS)}", EXIT_USAGE)
    return 0


def main(flow: Flow[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run a flow of `FLOWS` with the options in `arguments` (the process's own if None); returns the exit code."""
    name, is_nightly, is_explain = flow.name, flow.name == "nightly", flow.name == "explain"
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
        with plain_log(sys.stderr if is_explain else sys.stdout), quiet_prefect():
            result = flow(**options)
    except (BatchloomError, OSError) as error:
        return _fail(name, " ".join(str(error).split()), EXIT_FAILED)
    except HTTPError as error:
        return _fail(name, f"the Prefect server does not answer any more: {error}", EXIT_FAILED)
    except KeyboardInterrupt:
        rest = "; what is answered is kept, and the next run does the rest"
        return _fail(name, "stopped" + rest * is_nightly, EXIT_INTERRUPTED)
    if is_explain:
        from flows.explain_page import print_forecasts

        print_forecasts(result, is_json=is_json)
    return 0


@contextmanager
def plain_log(stream: TextIO) -> Iterator[None]:
    """Our own log as plain lines on `stream`; Prefect's, to the end, only where the environment asks for it."""
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        for other in logging.getLogger().handlers:
            if isinstance(other, PrefectConsoleHandler):
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


def end_quietly() -> None:
    """The last thing at exit. After it, Python would search all that the libraries made for cycles, for two seconds,
    and DuckDB's bindings report what Prefect keeps alive to the very end as leaks.
    """
    gc.freeze()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the process as an exception does, so that what must happen at exit happens."""
    sys.exit(EXIT_TERMINATED)


def _fail(command: str, message: str, code: int) -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return code
