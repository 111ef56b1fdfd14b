"""The command line of the nightly flow: options from its settings, one line for an error, a quiet Prefect."""

import argparse
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from httpx import HTTPError
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)
from pydantic import BaseModel, ValidationError

from engine.errors import BatchloomError, ConfigError
from flows.settings import EngineSettings, FailureSettings, PlanSettings, WorkerSettings
from tasks.runs.run_folder import runs_folder

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(nightly: Flow[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run the flow with the options in `arguments` (the process's own if None); returns the exit code."""
    options = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    try:
        engine = EngineSettings.model_validate({name: options.pop(name) for name in EngineSettings.model_fields})
        planning = PlanSettings.model_validate({name: options.pop(name) for name in PlanSettings.model_fields})
        failures = FailureSettings.model_validate({name: options.pop(name) for name in FailureSettings.model_fields})
        machines = WorkerSettings.model_validate({name: options.pop(name) for name in WorkerSettings.model_fields})
    except ValidationError as error:
        return _fail("; ".join(f"{option(str(e['loc'][0]))}: {e['msg']}" for e in error.errors()), EXIT_USAGE)
    atexit.register(end_quietly)
    signal.signal(signal.SIGTERM, terminate)
    try:
        with plain_log(), quiet_prefect(options["database"]):
            nightly(**options, engine=engine, planning=planning, failures=failures, machines=machines)
    except (BatchloomError, OSError) as error:
        return _fail(" ".join(str(error).split()), EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("stopped; finished partitions are kept, and the next run does the rest", EXIT_INTERRUPTED)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.nightly",
        description="Answer the rows of a database that have no answer yet, with a language model, into its tables.",
    )
    add_inputs(parser, full="answer every row again, not only what is new or changed")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="at the end, put a copy for readers there")
    _add_settings(parser, FailureSettings)
    _add_settings(parser, WorkerSettings)
    return parser


def add_inputs(parser: argparse.ArgumentParser, *, full: str) -> None:
    """The options of every flow over a database's workloads; `full` is the help of ``--full``."""
    parser.add_argument("--database", type=Path, required=True, help="DuckDB file")
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file or hub id")
    parser.add_argument(
        "--workload",
        dest="workloads",
        action="append",
        metavar="NAME",
        help="shipped workload by name or a TOML file by its path; again for more; default: snippets, then ranking",
    )
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument(
        "--lock-timeout-seconds", type=float, metavar="VALUE", help="to wait for a locked database (default: 30)"
    )
    for settings in (EngineSettings, PlanSettings):
        _add_settings(parser, settings)


def _add_settings(parser: argparse.ArgumentParser, settings: type[BaseModel]) -> None:
    """An option for each field; its value is checked by the settings themselves."""
    group = parser.add_argument_group(str(settings.__doc__).splitlines()[0].split(";")[0].rstrip("."))
    for name, field in settings.model_fields.items():
        group.add_argument(
            option(name),
            default=field.default,
            metavar="VALUE",
            help=f"{field.description} (default: {field.default})",
        )


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextmanager
def plain_log() -> Iterator[None]:
    """Our own log as plain lines on standard output; Prefect's, to the end, only where the environment asks for it."""
    if "PREFECT_LOGGING_LEVEL" not in os.environ:
        for other in logging.getLogger().handlers:
            if isinstance(other, PrefectConsoleHandler):
                other.setLevel(logging.CRITICAL)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("batchloom")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextmanager
def quiet_prefect(database: Path) -> Iterator[None]:
    """Prefect's results beside the runs of the database, no usage statistics, and patience with its temporary server
    where it needs one. What the environment sets stays as it is.

    Raises:
        ConfigError: no Prefect server answers.
    """
    preferred = {
        PREFECT_LOCAL_STORAGE_PATH: runs_folder(database) / "results",
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
        PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 90,
    }
    with temporary_settings({key: value for key, value in preferred.items() if key.name not in os.environ}):
        # A terminal sends Ctrl-C to every process of the job. The server inherits that it is blocked, so that a run can
        # still say how it ended.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with get_client(sync_client=True) as client:
                client.hello()
        except (RuntimeError, HTTPError) as error:
            raise ConfigError(f"no Prefect server at {PREFECT_API_URL.value() or 'this machine'}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        yield


def end_quietly() -> None:
    """The last thing at exit. After it, Python would search all that the libraries made for cycles, for two seconds,
    and DuckDB's bindings report what Prefect keeps alive to the very end as leaks.
    """
    gc.freeze()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the process as an exception does, so that what must happen at exit happens."""
    sys.exit(EXIT_TERMINATED)


def _fail(message: str, code: int) -> int:
    print(f"nightly: {message}", file=sys.stderr)
    return code
