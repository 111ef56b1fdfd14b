"""The process that computes prompts for another one, which schedules them and decodes.

It has KV memory of as many blocks as the other process, and writes where the other's scheduler says. Steps are
computed in the order in which they come, so each block holds what the scheduler takes it to hold. No scheduler, request
or answer is needed here: token batches in; the KV of the blocks they wrote, and the last hidden states, out.
"""

import contextlib
import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

from engine.disaggregation.block_transport import BlockTransport, DistributedTransport, SharedMemoryTransport
from engine.disaggregation.prefill_message import PrefillJob, PrefillStep
from engine.engine import Engine

_ENGINE_RANK = 0


def serve_prefills(model: str | Path, *, device: str = "auto") -> None:
    """Computes the prompts of an engine with disaggregation "distributed" until that engine is closed or dropped.

    Call it in rank 1 of two torch.distributed processes, on a backend for the CPU such as gloo, while rank 0 has the
    engine. The timeout that the group was made with bounds how long one waits for the other.

    Args:
        model: checkpoint folder, GGUF file or hub id, of the same weights as the engine's.
        device: of this process. The number format is the engine's.
    Raises:
        ConfigError, ModelError, CapacityError: the checkpoint does not fit the engine, which raises it, too.
        RuntimeError: the other process is gone.
    """
    _serve(DistributedTransport(_ENGINE_RANK), model, device)


def _serve(transport: BlockTransport, model: str | Path | None = None, device: str | None = None) -> None:
    """Raises what goes wrong, once the other process has been told."""
    job = transport.receive()[0]
    if job is None:
        return
    assert isinstance(job, PrefillJob)
    try:
        engine = Engine.load(model or job.model or "", replace(job.config, device=device or job.config.device))
        engine.check_kv_shape(job.kv_shape)
        while (step := transport.receive()[0]) is not None:
            assert isinstance(step, PrefillStep)
            transport.send(*engine.compute_prompts(step.batch, is_compiled=step.is_compiled))
        transport.send(None)
    except Exception as error:
        _tell(transport, error)
        raise


def _tell(transport: BlockTransport, error: Exception) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the line is what has failed
        transport.send(error)


def _end_with(transport: SharedMemoryTransport) -> None:
    transport.wait_for_hangup()
    os._exit(0)  # in the middle of a step, too: nobody wants it any more


def main() -> None:
    """Serves the process that has started this one; arguments: file descriptors of line and memory, its bytes."""
    line_fd, memory_fd, num_bytes = map(int, sys.argv[1:])
    transport = SharedMemoryTransport(socket.socket(fileno=line_fd), memory_fd, num_bytes)
    os.close(memory_fd)
    threading.Thread(target=_end_with, args=(transport,), daemon=True).start()
    _serve(transport)


if __name__ == "__main__":
    main()
