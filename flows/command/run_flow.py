"""Runs a flow or a function as a command: its options, an error as one line, the exit code."""

import atexit
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from httpx import HTTPError
from prefect import Flow
from prefect.logging.handlers import PrefectConsoleHandler

from engine.errors import BatchloomError, ConfigError, ModelError, NightError
from flows.command import failure
from flows.command.option_faults import describe_workloads
from flows.command.options import parse_options
from flows.command.prefect_server import CONFIGURED_URL, reachable_server
from tasks.runs.run_record import NEEDS_FULL


def run_flow(command: Flow[..., Any] | Callable[..., int], arguments: Sequence[str] | None = None) -> int:
    """Run a flow, or the function of another command, with the options in `arguments` (the process's own if None);
    returns the exit code. A flow has a Prefect server, and its log goes to standard output."""
    name, function = (command.name, command.fn) if isinstance(command, Flow) else (command.__name__, command)
    try:
        options = parse_options(name, function, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        return failure.fail(f"{name}: {error}", failure.EXIT_USAGE)
    try:
        if options is None:
            return 0
        return _run_flow(command, options) if isinstance(command, Flow) else command(**options)
    except (BatchloomError, OSError) as error:
        lines = [str(error), *(describe_workloads(options or {}) if isinstance(error, ModelError) else ())]
        return failure.fail(f"{name}: {' '.join('; '.join(lines).split())}", failure.EXIT_FAILED)


def _run_flow(flow: Flow[..., Any], options: dict[str, Any]) -> int:
    name, is_explain, is_json = flow.name, flow.name == "explain", options.pop("json", False)
    atexit.register(failure.end_quietly)
    signal.signal(signal.SIGTERM, failure.end)  # so that exit handlers run
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, failure.end)
    if can_interrupt := signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a shell's background job
        signal.signal(signal.SIGINT, partial(failure.interrupt, []))
    try:
        with plain_log(sys.stderr if is_explain or is_json else sys.stdout), reachable_server():
            for handler in logging.getLogger("prefect.extra").handlers if CONFIGURED_URL else ():
                logging.getLogger("batchloom").addHandler(handler)  # the server's page shows the log, too
            result = flow(**options)
    except NightError as error:
        if is_json:
            print(json.dumps(error.steps, indent=1), flush=True)
        raise
    except HTTPError as error:
        return failure.fail(f"{name}: {failure.describe_lost_server(error)}", failure.EXIT_FAILED)
    except (KeyboardInterrupt, SystemExit) as error:
        is_kept = name == "nightly" and (options.get("sample") is None or options.get("keep"))
        rest = "; what is answered is kept, and the next run does the rest" if is_kept else ""
        rest += NEEDS_FULL if is_kept and options.get("full") else ""
        return failure.fail(f"{name}: stopped{rest}", getattr(error, "code", failure.EXIT_INTERRUPTED))
    finally:
        if can_interrupt:  # the process only exits now: no traceback
            signal.signal(signal.SIGINT, lambda *_: os._exit(failure.EXIT_INTERRUPTED))
    if is_explain:
        from flows.explain_page import print_forecasts

        print_forecasts(result, is_json=is_json)
    elif is_json:
        print(json.dumps([asdict(summary) for summary in result], indent=1), flush=True)
    return 0


@contextmanager
def plain_log(stream: TextIO) -> Iterator[None]:
    """Write batchloom's log to `stream` as plain lines; hide Prefect's unless PREFECT_LOGGING_LEVEL is set."""
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        for other in (*logging.root.handlers, *logging.getLogger("prefect._internal").handlers):
            if type(other).__module__ == PrefectConsoleHandler.__module__:  # not those that a user has added
                other.setLevel(logging.CRITICAL)
    handler = failure.LogHandler(stream)
    logger = logging.getLogger("batchloom")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def prepare_console() -> None:
    """Show batchloom's messages, and keep a night alive if nobody reads its console any more, as when the worker of its
    deployment dies. A process that Prefect has started ends quietly."""
    logging.getLogger("batchloom").setLevel(logging.INFO)
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        atexit.register(failure.end_quietly)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, PrefectConsoleHandler):
                console = handler.console
                # rich ends the process when a line cannot be printed; this makes it stop printing instead.
                console.on_broken_pipe = partial(setattr, console, "quiet", True)  # type: ignore[method-assign]
