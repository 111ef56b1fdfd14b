"""The worker process of disaggregation, which computes prompts for the process that schedules and decodes.

It receives token batches, computes them in order, and sends the last hidden states and the KV of the written blocks.
"""

import sys

from engine.disaggregation.worker_line import PrefillJob, WorkerStep, serve_parent
from engine.worker_engine import WorkerEngine


def main() -> None:
    """Serves the parent process. Arguments: file descriptors of socket and shared memory, the memory's bytes."""
    with serve_parent(*map(int, sys.argv[1:])) as line:
        job = line.receive()[0]
        assert isinstance(job, PrefillJob)
        engine = WorkerEngine.load(job.model, job.config)
        engine.check_kv_shape(job.kv_shape)
        while True:
            step = line.receive()[0]
            assert isinstance(step, WorkerStep)
            line.send(*engine.compute_prompts(step.batch, is_compiled=step.is_compiled))


if __name__ == "__main__":
    main()
