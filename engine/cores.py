"""The cores that this process may use. The package imports this module before torch is imported."""

import logging
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager

LOGGER = logging.getLogger("batchloom.engine")

CORES = frozenset(os.sched_getaffinity(0))
"""The cores before torch is imported."""

BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Of OpenMP, which then binds the thread that imports torch to the first core."""


def usable_cores() -> Set[int]:
    """Cores that this process may use, also where OpenMP has bound this thread to one of them."""
    return CORES if any(name in os.environ for name in BINDING_VARIABLES) else os.sched_getaffinity(0)


def usable_threads(num_threads: int) -> int:
    """num_threads, but at most one for each core that this process may use; a reduction is logged."""
    num_cores = len(usable_cores())
    if num_threads > num_cores:
        LOGGER.info("num_threads is %d, this process may use %d cores: %d threads", num_threads, num_cores, num_cores)
    return min(num_threads, num_cores)


@contextmanager
def on_usable_cores() -> Iterator[None]:
    """Lets this thread use the cores of its process during the block; a process that it starts inherits that."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable_cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
