"""The worker process of disaggregation, which computes prompts for the process that schedules and decodes.

It receives token batches, computes them in order, and sends the last hidden states and the KV of the written blocks.
"""

import contextlib
import os
import socket
import sys

from engine.child_process import end_with_parent
from engine.disaggregation.worker_line import PrefillJob, WorkerLine, WorkerStep
from engine.worker_engine import WorkerEngine


def main() -> None:
    """Serves the parent process. Arguments: file descriptors of socket and shared memory, the memory's bytes."""
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
        with contextlib.suppress(OSError):  # the connection itself may have failed
            line.send(error)
        raise


if __name__ == "__main__":
    main()
