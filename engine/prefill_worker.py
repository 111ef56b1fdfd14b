"""The process that computes prompts for another one, which schedules them and decodes.

Token batches come in and are computed in turn; the last hidden states go out, and the KV of the blocks they wrote.
"""

import contextlib
import os
import socket
import sys

from engine.child_process import end_with_parent
from engine.disaggregation.worker_line import PrefillJob, WorkerLine, WorkerStep
from engine.worker_engine import WorkerEngine


def main() -> None:
    """Serves the process that has started this one; arguments: file descriptors of socket and memory, its bytes."""
    socket_fd, memory_fd, num_bytes = map(int, sys.argv[1:])
    line = WorkerLine(socket.socket(fileno=socket_fd), memory_fd, num_bytes)
    os.close(memory_fd)
    end_with_parent(socket_fd)
    try:
        job = line.receive()[0]
        assert isinstance(job, PrefillJob)
        engine = WorkerEngine.load(job.model, job.config)
        engine.check_kv_shape(job.kv_shape)
        while True:
            step = line.receive()[0]
            assert isinstance(step, WorkerStep)
            line.send(*engine.compute_prompts(step.batch, is_compiled=step.is_compiled))
    except Exception as error:
        with contextlib.suppress(OSError):  # the line is what has failed
            line.send(error)
        raise


if __name__ == "__main__":
    main()
