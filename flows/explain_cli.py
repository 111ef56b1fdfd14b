"""The command line of the explain flow: the nightly flow's options and a device; a page for people or JSON."""

import argparse
import atexit
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefect import Flow
from pydantic import ValidationError
from rich.console import Console

from engine.errors import BatchloomError
from engine.simulation.device import DEVICES
from flows.cli import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    add_inputs,
    end_quietly,
    option,
    plain_log,
    quiet_prefect,
    terminate,
)
from flows.explain_page import show_forecast
from flows.settings import EngineSettings, PlanSettings, WorkerSettings


def main(explain: Flow[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run the flow with the options in `arguments` (the process's own if None); returns the exit code."""
    options = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    as_json, device = options.pop("json"), options.pop("device")
    try:
        settings = {name: options.pop(name) for name in EngineSettings.model_fields if name in options}
        engine = EngineSettings.model_validate(settings)
        planning = PlanSettings.model_validate({name: options.pop(name) for name in PlanSettings.model_fields})
        workers = WorkerSettings.model_validate({"workers": options.pop("workers")}).workers
    except ValidationError as error:
        return _fail("; ".join(f"{option(str(e['loc'][0]))}: {e['msg']}" for e in error.errors()), EXIT_USAGE)
    atexit.register(end_quietly)
    signal.signal(signal.SIGTERM, terminate)
    try:
        with plain_log(), quiet_prefect(options["database"]):
            for handler in logging.getLogger("batchloom").handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)  # standard output is the answer's
            forecasts = explain(**options, device=device, workers=workers, engine=engine, planning=planning)
    except (BatchloomError, OSError) as error:
        return _fail(" ".join(str(error).split()), EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("stopped", EXIT_INTERRUPTED)
    if as_json:
        print(json.dumps([asdict(forecast) for forecast in forecasts], indent=1))
    else:
        for forecast in forecasts:
            show_forecast(forecast, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.explain",
        description="Say what the nightly flow would do and how long it would take, without loading the model.",
        conflict_handler="resolve",
    )
    add_inputs(parser, full="explain every row, not only what is new or changed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.add_argument(  # in place of the engine's own, which only knows what this machine has
        "--device",
        default="auto",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}; cpu or cuda: of this machine; auto: its GPU, else its CPU (default: auto)",
    )
    parser.add_argument(
        "--workers",
        default="auto",
        metavar="NUMBER",
        help="engines side by side, each on such a device, or dividing this machine's CPU; auto: one of a named "
        "device, else what the night has (default: auto)",
    )
    return parser


def _fail(message: str, code: int) -> int:
    print(f"explain: {message}", file=sys.stderr)
    return code
