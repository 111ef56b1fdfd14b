"""Runs a night of two rows, a snippet and a score, and prints as JSON which product functions it called, by module.

    python -m tests.docs.traced_night DATABASE MODEL

The night's report page is left out: it is made when the answers are in their tables.
"""

import inspect
import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = ("flows", "tasks", "engine", "sql", "workloads")
REPORT = ("tasks/report_page/", "tasks/report.py", "flows/report.py")


def main(database: str, model: str) -> int:
    called: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        """Only calls: it asks for no events of lines and returns."""
        code = frame.f_code
        # Not the bodies of modules and classes, nor the functions by which Python 3.14 evaluates annotations.
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "__annotate__":
            called.add((code.co_filename, code.co_qualname))

    for name in ("prefect", "torch", "transformers"):  # their imports make millions of calls
        import_module(name)
    threading.settrace(record)
    sys.settrace(record)
    from flows.command.run_flow import run_flow as run_command
    from flows.nightly import nightly

    options = ["--device", "cpu", "--kv-memory", "8MiB"]
    status = run_command(nightly, ["--database", database, "--model", model, *options])
    sys.settrace(None)
    functions: dict[str, list[str]] = {}
    for file, name in sorted(called):
        path = Path(file)
        if path.is_relative_to(ROOT):
            module = path.relative_to(ROOT).as_posix()
            if module.split("/")[0] in PRODUCT and not module.startswith(REPORT):
                functions.setdefault(module, []).append(name)
    print(json.dumps(functions))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
