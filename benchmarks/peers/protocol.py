"""The protocol between a benchmark and an engine's process: one JSON object per line. Standard library only.

The process reads calls from standard input and answers on its original standard output; output of the engine's
libraries is redirected to standard error.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Settings that are the same for every engine, except options.

    Attributes:
        model: checkpoint folder: config.json, safetensors, tokenizer.json.
        dtype: "float32" or "bfloat16", of weights, arithmetic and KV; or "int8", of weights and activations,
            with KV in the engine's best format.
        kv_tokens: tokens whose KV fits in the KV memory.
        kv_bytes: the same in bytes.
        max_num_batched_tokens: most tokens in one step of the model.
        max_model_len: tokens of the longest prompt plus answer.
        scratch: folder for converted checkpoints of this model's files; kept between runs.
        options: further settings of the engine, by name.
    """

    model: str
    dtype: str
    device: str
    kv_tokens: int
    kv_bytes: int
    max_num_batched_tokens: int
    max_model_len: int
    num_threads: int
    scratch: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts to answer greedily, each with the same number of new tokens, end-of-sequence tokens ignored.

    Attributes:
        token_ids: one list per request.
        labels: token ids to score after each prompt; an engine that cannot score generates one token.
        schema: JSON schema of every answer, which ends with its JSON; "": no schema.
    """

    token_ids: list[list[int]]
    num_output_tokens: int
    labels: list[int] = field(default_factory=list)
    schema: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The result of a `Work`.

    Attributes:
        token_ids: per request, in the order of the work; empty lists if labels were scored.
        label_logprobs: per request, normalised over the labels; empty if the engine generated tokens.
        seconds: from token ids in memory to token ids in memory, planning included.
        num_computed_tokens: tokens that went through the layers; None if the engine does not report it.
        details: further numbers, by name.
    """

    token_ids: list[list[int]]
    seconds: float
    label_logprobs: list[list[float]] = field(default_factory=list)
    num_computed_tokens: int | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The answer to `load`.

    Attributes:
        versions: of the packages that compute, by name.
        details: numbers by name, such as seconds spent converting the checkpoint.
    """

    versions: dict[str, str]
    details: dict[str, float] = field(default_factory=dict)


def serve(engine: Any) -> None:
    """Answer calls of the engine's methods until standard input ends.

    Compared engines have `load(settings: LoadSettings) -> Loaded` and `run(work: Work) -> Answers`; other methods take
    a mapping and return one.

    An answer carries the seconds that the call took and the process's memory: {"answer", "seconds", "memory"}, or
    {"error"} with the traceback, after which the process goes on.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    forms = {"load": LoadSettings, "run": Work}
    for line in sys.stdin:
        message = json.loads(line)
        reset_peak_memory()
        started = time.perf_counter()
        try:
            form = forms.get(message["call"], dict)
            answer: Any = getattr(engine, message["call"])(form(**message["arguments"]))
            seconds = time.perf_counter() - started
            reply = {
                "answer": answer if isinstance(answer, dict) else asdict(answer),
                "seconds": seconds,
                "memory": memory(),
            }
        except Exception as error:  # reported to the caller
            reply = {
                "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                "traceback": traceback.format_exc(),
            }
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even while it is stopped."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def process_tree() -> list[int]:
    """This process and its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process has ended
    tree = [os.getpid()]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def reset_peak_memory() -> None:
    """Reset the peak memory of host and device."""
    for pid in process_tree():
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            continue  # ended, or not permitted: then the peak is that of its whole life
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, int]:
    """Peak bytes since the last reset: resident on the host (children included), and allocated on a GPU by torch."""
    host_bytes = 0
    for pid in process_tree():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        host_bytes += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    return {"host_bytes": host_bytes, "device_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}
