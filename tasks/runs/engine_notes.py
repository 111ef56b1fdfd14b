"""Notes in a run's folder of engines whose settings were not those of the run, until its record has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import replace_file


def note_engine(job: InferJob, config: EngineConfig) -> None:
    """Note in the runs' folders the settings that an engine has: less memory than asked for, or on a GPU a number of
    tokens for each step in place of "auto". Engines with the same ones share a note, whose name begins with the tokens
    of a step."""
    tokens, asked = config.step_tokens, job.engine
    value: dict[str, Any] = {"step_tokens": tokens}
    if tokens < asked.step_tokens or replace(config, max_num_batched_tokens=asked.max_num_batched_tokens) != asked:
        memory = {"kv_memory_bytes": config.kv_memory_bytes, "memory_fraction": config.memory_fraction}
        value = {**memory, "max_num_batched_tokens": tokens}
    for member in job.members:
        path = member.run_folder / "engines" / f"{'-'.join(map(str, reversed(value.values())))}.json"
        if not path.exists():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with replace_file(path) as file:
                file.write(json.dumps(value).encode())


def read_notes(run_folder: Path) -> dict[str, Any]:
    """What the run's configuration says about its engines: most tokens of a step as ``step_tokens``, the settings of
    those with less memory, most tokens first, as ``engines_with_less_memory``."""
    paths = sorted(run_folder.glob("engines/*.json"), key=lambda path: int(path.stem.partition("-")[0]), reverse=True)
    notes = [json.loads(path.read_bytes()) for path in paths]
    sizes = [note for note in notes if "step_tokens" in note]
    lowered = [note for note in notes if "step_tokens" not in note]
    return (sizes[0] if sizes else {}) | ({"engines_with_less_memory": lowered} if lowered else {})
