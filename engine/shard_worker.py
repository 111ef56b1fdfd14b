"""The process of a rank of a sharded model other than the first, which sends it each step."""

import contextlib
import sys
from pathlib import Path

from engine.device.placement import resolve_device, use_device
from engine.disaggregation.worker_line import WorkerStep, serve_parent
from engine.model.shard import Shard
from engine.worker_engine import WorkerEngine


def main() -> None:
    """Serves the first rank. Arguments: file descriptors of socket and shared memory, the memory's bytes, rank, number
    of ranks, the file through which the ranks find each other."""
    socket_fd, memory_fd, num_bytes, rank, size = map(int, sys.argv[1:6])
    with serve_parent(socket_fd, memory_fd, num_bytes) as line, contextlib.suppress(EOFError):
        model, config = line.receive()[0]
        shard = Shard(rank, size, resolve_device(config.device))
        use_device(shard.device)
        line.send(None)
        shard.join(Path(sys.argv[6]))
        engine = WorkerEngine.load(model, config, shard=shard)
        while True:
            step = line.receive()[0]
            assert isinstance(step, WorkerStep)
            engine.compute_share(step.batch)


if __name__ == "__main__":
    main()
