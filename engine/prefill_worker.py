"""The process that computes prompts for another one, which schedules them and decodes.

It has KV memory of as many blocks as the other process, and writes where the other's scheduler says. Steps are
computed in the order in which they come, so each block holds what the scheduler takes it to hold. No scheduler, request
or answer is needed here: token batches in; the KV of the blocks they wrote, and the last hidden states, out.
"""

import contextlib
import os
import socket
import sys

from engine.child_process import end_with_parent
from engine.disaggregation.prefill_line import PrefillJob, PrefillLine, PrefillStep
from engine.engine import Engine


def main() -> None:
    """Serves the process that has started this one; arguments: file descriptors of socket and memory, its bytes."""
    socket_fd, memory_fd, num_bytes = map(int, sys.argv[1:])
    line = PrefillLine(socket.socket(fileno=socket_fd), memory_fd, num_bytes)
    os.close(memory_fd)
    end_with_parent(socket_fd)
    try:
        job = line.receive()[0]
        assert isinstance(job, PrefillJob)
        engine = Engine.load(job.model, job.config)
        engine.check_kv_shape(job.kv_shape)
        while True:
            step = line.receive()[0]
            assert isinstance(step, PrefillStep)
            line.send(*engine.compute_prompts(step.batch, is_compiled=step.is_compiled))
    except Exception as error:
        with contextlib.suppress(OSError):  # the line is what has failed
            line.send(error)
        raise


if __name__ == "__main__":
    main()
